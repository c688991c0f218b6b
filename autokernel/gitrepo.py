"""The run's own branch and worktree; the user's checkout, index, stash, HEAD and config are never touched. No torch.

Commits are made with git's plumbing from the exact bytes of the text: no hook, filter, attribute, template or signing
key of the user's takes part, and her identity is neither needed nor used. Every call names the git directory of the
worktree, so that git cannot find another repository by looking upwards when the worktree is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from autokernel.errors import RepositoryError
from autokernel.gitcall import git_output, is_in_repository, run_git

KERNEL_FILE = "kernel.py"

_GONE = "make the branch again at the newest commit that the run's journal names, or start a new run"

_TRAILER_KEY = re.compile(r"[A-Za-z][A-Za-z0-9-]*")


@dataclass(kw_only=True)
class RunRepository:
    """Branch `autokernel/<run>` and the worktree where it is checked out.

    `root` is a linked worktree of the user's repository, or a repository of its own when she has none. The branch is
    expected to be where this object last left it.
    """

    root: Path
    run: str
    _expected: str = field(default="", repr=False)

    @property
    def branch(self) -> str:
        """Name of the run's branch."""
        return f"autokernel/{self.run}"

    @classmethod
    def create(cls, workdir: Path, run_dir: Path, run: str) -> RunRepository:
        """Make branch and worktree for a new run.

        Raises: RepositoryError when there is no git, when git refuses, or when the branch exists.
        """
        repository = cls(root=(run_dir / "worktree").absolute(), run=run)
        ref, base = repository._ref, "none"
        if is_in_repository(workdir):
            where = ["-C", str(workdir)]
            if git_output([*where, "rev-parse", "-q", "--verify", ref], accept=(0, 1)):
                raise RepositoryError(
                    f"the branch {repository.branch} exists already",
                    hint="go on with that run by `autokernel run --resume`, or rename or delete the branch",
                )
            base = git_output([*where, "rev-parse", "-q", "--verify", "HEAD^{commit}"], accept=(0, 1)) or base
            start = repository._make_root(where, base)
            git_output([*where, "update-ref", "-m", "autokernel: start of the run", ref, start, "0" * len(start)])
            try:
                git_output([*where, "worktree", "add", "--no-checkout", str(repository.root), repository.branch])
            except RepositoryError:
                git_output([*where, "update-ref", "-d", ref, start])
                raise
        else:
            git_output(["init", "-q", "--template=", "-b", repository.branch, str(repository.root)])
            start = repository._make_root(repository._where, base)
            repository._git("update-ref", "-m", "autokernel: start of the run", ref, start)
        repository.restore(start)
        return repository

    @classmethod
    def open(cls, workdir: Path, run_dir: Path, run: str) -> RunRepository:
        """The repository of an existing run, its worktree made again if it is gone; call `restore` next.

        Raises: RepositoryError when there is no git, or when the branch or its repository is gone.
        """
        repository = cls(root=(run_dir / "worktree").absolute(), run=run)
        where = ["-C", str(workdir)]
        if not (repository.root / ".git").exists():
            if not is_in_repository(workdir):
                raise RepositoryError(f"{repository.root} is gone", hint="restore it from a backup, or start a new run")
            if not git_output([*where, "rev-parse", "-q", "--verify", repository._ref], accept=(0, 1)):
                # git would look for the name on the user's remotes, and write to her config.
                raise RepositoryError(f"the branch {repository.branch} is gone", hint=_GONE)
            git_output([*where, "worktree", "add", "-f", "--no-checkout", str(repository.root), repository.branch])
            repository.restore(repository.head())
        elif git_output([*repository._where, "rev-parse", "-q", "--git-dir"], accept=(0, 128)) == "":
            # The user moved the whole project: the worktree and its repository know each other by absolute paths.
            git_output([*where, "worktree", "repair", str(repository.root)])
        repository._clear_stale_locks()
        repository._git("symbolic-ref", "HEAD", repository._ref)
        repository._expected = repository.head()
        return repository

    def head(self) -> str:
        """Id of the branch's newest commit. Raises: RepositoryError when the branch is gone."""
        if commit := self._resolve(self._ref):
            return commit
        raise RepositoryError(
            f"the branch {self.branch} is gone", hint=f"`git reflog` may still know it; run {self.run}"
        )

    def first_commit(self) -> str:
        """Id of the branch's first commit, which holds no experiment."""
        return self._git("rev-list", "--max-parents=0", self._ref)

    def commit_kernel(self, text: str, *, subject: str, body: str = "", trailers: Mapping[str, str]) -> str:
        """Commit `text` as kernel.py, also when it is the same as before, and return the commit's id.

        Raises: RepositoryError when git refuses or the branch is not where this object left it.
        """
        return self._commit({KERNEL_FILE: text}, _message(subject, body, trailers))

    def commit_files(self, files: Mapping[str, str], subject: str, trailers: Mapping[str, str]) -> str:
        """Commit texts by relative path (`optimized/rmsnorm.py`), everything else unchanged; returns the commit's id.

        Nothing is committed when the branch has these very texts: its newest commit is returned.
        Raises: RepositoryError as `commit_kernel` does, and for a path that leaves the worktree.
        """
        for name in files:
            parts = PurePosixPath(name).parts
            if not parts or name.startswith("/") or any(part == ".." or part.lower() == ".git" for part in parts):
                raise RepositoryError(f"{name!r} is no path inside the worktree", hint="name a relative path")
        there, new = self._tree(self._expected), {name: text.encode() for name, text in files.items()}
        if all(there.get(name) == _blob_id(content, like=self._expected) for name, content in new.items()):
            return self._expected
        return self._commit(files, _message(subject, "", trailers))

    def reject(self, commit: str, *, number: int, back_to: str) -> None:
        """Keep `commit` reachable as `refs/autokernel/rejected/<run>/<number>` and reset branch and worktree."""
        self._git("update-ref", self._rejected_ref(number), commit)
        self.restore(back_to)

    def find_experiment(self, number: int) -> str | None:
        """The newest commit, kept or rejected, with the trailer `Experiment: <run>/<number>`; None if there is none."""
        refs = [ref for ref in (self._rejected_ref(number), self._ref) if self._resolve(ref)]
        wanted = f"Experiment: {self.run}/{number}"
        for ref in refs:
            listing = self._git("rev-list", "--format=%B%x00", ref)
            for entry in listing.split("\0"):
                header, _, message = entry.strip().partition("\n")
                if wanted in message.rpartition("\n\n")[2].splitlines():
                    return header.removeprefix("commit ")
        return None

    def restore(self, commit: str) -> None:
        """What `git reset --hard commit` does, with the exact bytes that were committed, in this worktree only.

        Raises: RepositoryError when the commit does not exist or git refuses.
        """
        target = self._resolve(f"{commit}^{{commit}}")
        if not target:
            raise RepositoryError(
                f"the commit {commit} of run {self.run} does not exist", hint="restore the repository from a backup"
            )
        before = set(filter(None, self._git("ls-files", "-z").split("\0")))
        self._git("update-ref", "-m", f"autokernel: reset to {target[:12]}", self._ref, target)
        self._git("read-tree", target)
        after = self._tree(target)
        for name in before - after.keys():
            (self.root / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # git keeps no empty folders; one with other files stays
                (self.root / name).parent.rmdir()
        for name, blob in after.items():
            path = self.root / name
            if path.is_symlink() or not path.is_file() or _blob_id(path.read_bytes(), like=blob) != blob:
                self._write(name, run_git([*self._where, "cat-file", "blob", blob]))
        self._expected = target

    # -- plumbing -----------------------------------------------------------------------------------------------------

    @property
    def _ref(self) -> str:
        return f"refs/heads/{self.branch}"

    @property
    def _where(self) -> list[str]:
        return [f"--git-dir={self.root / '.git'}", f"--work-tree={self.root}"]

    def _rejected_ref(self, number: int) -> str:
        return f"refs/autokernel/rejected/{self.run}/{number}"

    def _git(self, *arguments: str, stdin: bytes | None = None) -> str:
        return git_output([*self._where, *arguments], stdin=stdin)

    def _resolve(self, name: str) -> str:
        return git_output([*self._where, "rev-parse", "-q", "--verify", name], accept=(0, 1))

    def _make_root(self, where: Sequence[str], base: str) -> str:
        """A first commit with an empty tree: no file of the user's is ever part of the branch."""
        tree = git_output([*where, "mktree"], stdin=b"")
        body = "Each commit below is one experiment on kernel.py that was kept.\n" if base == "none" else ""
        message = _message(f"autokernel run {self.run}", body.strip(), {"Base": base})
        return git_output([*where, "commit-tree", tree, "-F", "-"], stdin=message)

    def _commit(self, files: Mapping[str, str], message: bytes) -> str:
        parent = self._expected
        self._git("read-tree", parent)
        for name, text in files.items():
            content = text.encode()
            blob = self._git("hash-object", "-w", "--stdin", stdin=content)
            self._git("update-index", "--add", "--cacheinfo", f"100644,{blob},{name}")
            self._write(name, content)
        tree = self._git("write-tree")
        commit = self._git("commit-tree", tree, "-p", parent, "-F", "-", stdin=message)
        subject = message.partition(b"\n")[0].decode()
        try:  # git moves the branch only from where this run left it
            self._git("update-ref", "-m", f"autokernel: {subject}", self._ref, commit, parent)
        except RepositoryError as error:
            raise RepositoryError(
                f"the branch {self.branch} did not move from {parent[:12]} to {commit[:12]}: {error}",
                hint="leave the branch to the run; `autokernel run --resume` sets it back to the recorded commit",
            )
        if self.head() != commit:
            raise RepositoryError(f"the branch {self.branch} is not at {commit[:12]}, just set", hint="see `git fsck`")
        self._expected = commit
        return commit

    def _tree(self, commit: str) -> dict[str, str]:
        """Blob id by path."""
        entries = self._git("ls-tree", "-r", "-z", "--full-tree", commit).split("\0")
        return {name: about.split()[2] for about, _, name in (entry.partition("\t") for entry in entries if entry)}

    def _write(self, name: str, content: bytes) -> None:
        path = self.root / name
        partial = path.with_name(path.name + ".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(content)
            partial.replace(path)
        except OSError as error:
            raise RepositoryError(f"{path} cannot be written: {error.strerror}", hint="check space and permissions")

    def _clear_stale_locks(self) -> None:
        """Remove lock files that a killed git left on what only this run writes to; the caller is the only writer."""
        for name in ("index", "HEAD", self._ref):
            lock = self._git("rev-parse", "--git-path", f"{name}.lock")
            (self.root / lock).unlink(missing_ok=True)
        rejected = self._git("rev-parse", "--git-path", f"refs/autokernel/rejected/{self.run}")
        for path in (self.root / rejected).glob("*.lock"):
            path.unlink(missing_ok=True)


def _message(subject: str, body: str, trailers: Mapping[str, str]) -> bytes:
    """A commit message whose last paragraph is the trailers, whatever subject, body and values contain."""
    for key in trailers:
        if not _TRAILER_KEY.fullmatch(key):
            raise RepositoryError(f"{key!r} is no trailer name", hint="use letters, digits and dashes")
    lines = [f"{key}: {_one_line(value)}" for key, value in trailers.items()]
    paragraphs = [_one_line(subject) or "(no subject)", body.strip(), "\n".join(lines)]
    text = "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"
    return text.replace("\0", " ").encode("utf-8", "replace")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _blob_id(content: bytes, *, like: str) -> str:
    """git's id of a blob with this content, by the hash that made the id `like`."""
    digest = hashlib.sha1 if len(like) == 40 else hashlib.sha256
    return digest(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
