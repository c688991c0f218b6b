"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const headers = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  headers.forEach((header, column) => {
    header.querySelector("button").addEventListener("click", () => {
      const up = header.getAttribute("aria-sort") !== "ascending";
      for (const other of headers) other.setAttribute("aria-sort", "none");
      header.setAttribute("aria-sort", up ? "ascending" : "descending");
      const numeric = header.dataset.kind === "number";
      const key = (row) => row.cells[column].dataset.key ?? row.cells[column].textContent;
      const compare = (a, b) => {
        const [left, right] = [key(a), key(b)];
        // What is unknown stays at the end in either direction.
        if (numeric && (left === "" || right === "")) return (left === "") - (right === "");
        const order = numeric ? Number(left) - Number(right) : left.localeCompare(right);
        return up ? order : -order;
      };
      for (const row of [...body.rows].sort(compare)) body.append(row);
    });
  });
}
