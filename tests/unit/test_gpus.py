"""The GPU table, matching by name, and estimates. `python tests/unit/test_gpus.py` writes the table of docs/gpus.md."""

from pathlib import Path

import pytest

from autokernel import gpus

DOCUMENT = Path(__file__).parents[2] / "docs" / "gpus.md"
START, END = "<!-- table: python tests/unit/test_gpus.py writes it -->\n", "<!-- end of table -->\n"
GIB = 1 << 30

PARTS = {
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA GH200 480GB": "GH200 96GB",
    "NVIDIA GH200 144G HBM3e": "GH200 144GB",
    "NVIDIA B200": "B200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA A100-SXM4-40GB": "A100 SXM 40GB",
    "NVIDIA A100-SXM4-80GB": "A100 SXM 80GB",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe 80GB",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA L4": "L4",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 4080": "RTX 4080",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 3080": "RTX 3080",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI325X": "MI325X",
    "AMD Instinct MI350X": "MI350X",
    "AMD Instinct MI355X": "MI355X",
}

CLOCKS = {  # highest clock, memory clock as the driver reports it, bus width; 0: not known
    "H100 SXM": (1980, 2619, 5120),
    "H100 PCIe": (1755, 1593, 5120),
    "H100 NVL": (1785, 2619, 6016),
    "H200 SXM": (1980, 3201, 6144),
    "H200 NVL": (1785, 3201, 6144),
    "GH200 96GB": (1980, 2619, 6144),
    "GH200 144GB": (1980, 3201, 6144),
    "B200": (1965, 3996, 8192),
    "B300": (1920, 3996, 8192),
    "A100 SXM 40GB": (1410, 1215, 5120),
    "A100 SXM 80GB": (1410, 1593, 5120),
    "A100 PCIe 40GB": (1410, 1215, 5120),
    "A100 PCIe 80GB": (1410, 1512, 5120),
    "L40": (2490, 9001, 384),
    "L40S": (2520, 9001, 384),
    "L4": (2040, 6251, 192),
    "A10": (1695, 6251, 384),
    "A10G": (1710, 6251, 384),
    "RTX 5090": (2407, 14001, 512),
    "RTX 4090": (2520, 10501, 384),
    "RTX 4080": (2505, 11201, 256),
    "RTX 3090": (1695, 9751, 384),
    "RTX 3080": (1710, 9501, 320),
    "MI300X": (2100, 1300, 8192),
    "MI325X": (2100, 1500, 8192),
    "MI350X": (2200, 0, 0),
    "MI355X": (2400, 0, 0),
}
RATED_BELOW_HIGHEST_CLOCK = {"H100 NVL", "H200 NVL"}
"""Their published tensor rates are those of a lower clock, that of fp32 is not."""

TENSOR_CORES_HALVED = {"L40", "A10G"}
"""Sold with tensor cores at half the rate of their architecture's other data-centre parts."""


@pytest.mark.parametrize("gpu", gpus.table(), ids=lambda gpu: gpu.name)
def test_entry_is_complete_and_plausible(gpu):
    assert gpu.names
    assert not gpu.estimated
    assert "https://" in gpu.source
    assert set(gpu.peak_tflops) <= set(gpus.DTYPES)
    assert {"fp32", "fp16", "bf16"} <= set(gpu.peak_tflops)
    assert all(10 < peak < 20_000 for peak in gpu.peak_tflops.values())
    assert 200 < gpu.bandwidth_gbps < 20_000
    assert 10 < gpu.sms < 500
    assert 4 <= gpu.memory_gb < 1000
    assert gpu.l2_bytes is None or 1 << 20 <= gpu.l2_bytes <= 1 << 28
    assert 48 << 10 <= gpu.shared_bytes <= gpu.shared_bytes_per_sm <= 512 << 10
    assert gpu.arch.startswith("gfx" if gpu.name.startswith("MI") else "sm_")


@pytest.mark.parametrize("gpu", gpus.table(), ids=lambda gpu: gpu.name)
def test_dense_rates_stand_in_the_ratios_of_the_hardware(gpu):
    """A sparse number among dense ones is twice too large."""
    peak = gpu.peak_tflops
    assert peak["fp16"] == peak["bf16"]
    if "tf32" in peak:
        assert peak["bf16"] / peak["tf32"] == pytest.approx(2, rel=0.02)
    if "fp8" in peak:
        assert peak["fp8"] / peak["bf16"] == pytest.approx(2, rel=0.03)
    if "int8" in peak:
        assert peak["int8"] / peak["bf16"] == pytest.approx(4 if gpu.name.startswith("RTX") else 2, rel=0.03)


def test_published_numbers():
    h100, h200 = gpus.lookup("NVIDIA H100 80GB HBM3"), gpus.lookup("NVIDIA H200")
    assert round(h100.peak_tflops["bf16"]) == 989
    assert h200.peak_tflops == h100.peak_tflops
    assert h200.bandwidth_gbps == 4800
    assert gpus.lookup("NVIDIA A100-SXM4-80GB").peak_tflops["fp16"] == 312
    assert gpus.lookup("NVIDIA GeForce RTX 4090").peak_tflops["fp16"] == 165.2


def test_every_part_is_found_by_its_own_name_only():
    assert {name: gpus.lookup(name).name for name in PARTS} == PARTS
    assert {gpu.name for gpu in gpus.table()} == set(PARTS.values())
    names = [name for gpu in gpus.table() for name in gpu.names]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA",
        "H100",
        "NVIDIA H100",
        "nvidia h200",
        "NVIDIA H20",
        "NVIDIA H800",
        "NVIDIA A100",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A10G-24Q",
        "NVIDIA A40",
        "NVIDIA L40G",
        "NVIDIA L20",
        "NVIDIA GB200",
        "NVIDIA GeForce RTX 3080 Ti",
        "NVIDIA GeForce RTX 3080 Laptop GPU",
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 5090 D",
        "AMD Instinct MI300A",
        "AMD Instinct MI308X",
        "AMD Radeon Graphics",
    ],
)
def test_similar_names_are_not_matched(name):
    assert gpus.lookup(name) is None


def test_surrounding_blanks_do_not_matter():
    assert gpus.lookup(" NVIDIA L4\n").name == "L4"


@pytest.mark.parametrize(
    ("name", "mib", "units"),
    [
        ("NVIDIA H100 80GB HBM3", 81089, 132),
        ("NVIDIA H100 PCIe", 81008, 114),
        ("NVIDIA H200", 143156, 132),
        ("NVIDIA GH200 144G HBM3e", 145920, 132),
        ("NVIDIA B200", 182631, 148),
        ("NVIDIA B300 SXM6 AC", 275040, 148),
        ("NVIDIA A10G", 22587, 80),
        ("NVIDIA L40S", 45589, 142),
        ("NVIDIA GeForce RTX 3080", 10240, 68),
        ("NVIDIA GeForce RTX 4080", 16049, 76),
        ("AMD Instinct MI300X", 196592, 304),
    ],
)
def test_reported_memory_and_units_fit(name, mib, units):
    assert gpus.lookup(name, memory_bytes=mib << 20, units=units).name == PARTS[name]


def test_a_card_of_the_same_name_with_other_memory_is_no_match():
    assert gpus.lookup("NVIDIA GeForce RTX 3080", memory_bytes=12 * GIB, units=70) is None
    assert gpus.lookup("NVIDIA GeForce RTX 3080", memory_bytes=12 * GIB) is None


def test_a_partition_of_a_gpu_is_no_match():
    assert gpus.lookup("NVIDIA H200", units=16) is None
    assert gpus.lookup("AMD Instinct MI300X", gcn_arch="gfx942", units=38) is None


def test_amd_parts_are_told_apart_by_architecture_units_and_memory():
    def find(arch, gib, units=304, name="AMD Radeon Graphics", **also):
        found = gpus.lookup(name, gcn_arch=arch, memory_bytes=int(gib * GIB), units=units, **also)
        return found.name if found else None

    assert find("gfx942:sramecc+:xnack-", 191.98) == "MI300X"
    assert find("gfx942:sramecc+:xnack-", 255.98) == "MI325X"
    assert find("gfx942", 191.98, units=80) is None  # MI308X
    assert find("gfx942", 127.5, units=228) is None  # MI300A
    assert find("gfx942", 191.98, name="AMD Instinct MI308X") is None
    assert find("gfx950:sramecc+:xnack-", 287.98, units=256) is None  # MI350X or MI355X
    assert find("gfx950:sramecc+:xnack-", 287.98, units=256, clock_mhz=2200) == "MI350X"
    assert find("gfx950:sramecc+:xnack-", 287.98, units=256, clock_mhz=2400) == "MI355X"
    assert find("gfx950:sramecc+:xnack-", 287.98, units=256, name="AMD Instinct MI355X") == "MI355X"
    assert gpus.lookup("AMD Radeon Graphics", gcn_arch="gfx942") is None


def test_architecture_must_agree_with_the_name():
    assert gpus.lookup("AMD Instinct MI300X", gcn_arch="gfx942").name == "MI300X"
    assert gpus.lookup("AMD Instinct MI300X", gcn_arch="gfx950") is None


def _estimate(gpu):
    clock, memory_clock, bus_bits = CLOCKS[gpu.name]
    arch = {"gcn_arch": gpu.arch}
    if gpu.arch.startswith("sm_"):
        arch = {"capability": divmod(int(gpu.arch.removeprefix("sm_")), 10)}
    return gpus.estimate(
        name=gpu.names[0], sms=gpu.sms, clock_mhz=clock, memory_clock_mhz=memory_clock, bus_bits=bus_bits, **arch
    )


@pytest.mark.parametrize("gpu", gpus.table(), ids=lambda gpu: gpu.name)
def test_estimates_are_near_the_published_numbers(gpu):
    guess = _estimate(gpu)
    assert guess.estimated
    assert guess.arch == gpu.arch
    for dtype, peak in gpu.peak_tflops.items():
        ratio = guess.peak_tflops[dtype] / peak
        if dtype == "fp32":
            assert ratio == pytest.approx(1, abs=0.04)
        elif gpu.name in TENSOR_CORES_HALVED:
            assert ratio == pytest.approx(2, abs=0.05)
        elif gpu.name in RATED_BELOW_HIGHEST_CLOCK:
            assert 1 < ratio < 1.2
        else:
            assert ratio == pytest.approx(1, abs=0.15)
    if CLOCKS[gpu.name][1]:
        assert guess.bandwidth_gbps / gpu.bandwidth_gbps == pytest.approx(1, abs=0.05)
    else:
        assert guess.bandwidth_gbps is None


def test_estimate_invents_nothing():
    unknown = gpus.estimate(name="NVIDIA Future", capability=(15, 0), sms=200, clock_mhz=2000)
    assert unknown.estimated
    assert unknown.peak_tflops == {}
    assert unknown.bandwidth_gbps is None
    assert unknown.l2_bytes is None
    assert unknown.shared_bytes is None
    assert unknown.memory_gb is None
    assert gpus.estimate(name="?", capability=(9, 0), sms=132, clock_mhz=0).peak_tflops == {}
    assert gpus.estimate(name="?", sms=10, clock_mhz=1000, memory_clock_mhz=1000, bus_bits=64).bandwidth_gbps == 16


def test_estimate_keeps_what_the_driver_reports():
    gpu = gpus.estimate(
        name="NVIDIA Thing", capability=(9, 0), sms=7, clock_mhz=1000, l2_bytes=5 << 20, shared_bytes=99 << 10,
        memory_bytes=8 * GIB,
    )  # fmt: skip
    assert (gpu.sms, gpu.l2_bytes, gpu.shared_bytes, gpu.memory_gb) == (7, 5 << 20, 99 << 10, 8.0)


def test_document_holds_the_table():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert START + "\n" + gpus.markdown() + "\n" + END in text, "run python tests/unit/test_gpus.py"


def _write_table():
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(START)
    after = rest.split(END)[1]
    DOCUMENT.write_text(before + START + "\n" + gpus.markdown() + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    _write_table()
