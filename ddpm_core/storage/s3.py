"""s3://bucket/prefix as storage.

Nothing can be renamed or appended to there. A folder is uploaded file by file and its manifest
last: without one it does not exist for readers. What is read as a file is copied to this machine
once, and checked.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from uuid import uuid4

from ddpm_core.console import warn
from ddpm_core.errors import Corrupt
from ddpm_core.storage.base import Changed, Tagged, Unreachable
from ddpm_core.storage.cache import Cache
from ddpm_core.storage.client import CONNECTIONS, connect, split
from ddpm_core.storage.mirror import PARTS, Segments, assemble
from ddpm_core.storage.sealing import MANIFEST, listed, seal, sha256_of
from ddpm_core.storage.staging import named
from ddpm_core.storage.transfer import Bucket, Facts, put_if

QUICK = {"attempts": 2, "connecting": 3.0, "reading": 5.0}  # for what must not wait long
_NO_CONDITIONS = (
    "This S3 server has no conditional put: two runs that start in one workspace at the same "
    "moment may not notice each other."
)


class S3Storage:
    """A prefix of a bucket. Keys are below it; a neighbour of a longer name is never touched."""

    def __init__(self, uri: str) -> None:
        """Raises Unreachable where the server, the bucket or the rights are not there."""
        bucket, prefix = split(uri, "workspace")
        prefix = prefix.strip("/")
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._quick = Bucket(connect(**QUICK), bucket)  # type: ignore[arg-type]
        self._check()
        self._bucket = Bucket(connect(), bucket)
        self._cache = Cache(f"{self._bucket.client.meta.endpoint_url} {self.uri}")
        self._conditional = True

    def exists(self, key: str) -> bool:
        name = self._name(key)
        if self._bucket.facts(name) or self._bucket.facts(f"{name}/{MANIFEST}"):
            return True
        return bool(self._bucket.level(f"{name}{PARTS}/"))

    def names(self, key: str) -> list[str]:
        found = self._bucket.level(self._folder(key))
        return sorted(name for name in found if not name.startswith("."))

    def sealed(self, key: str) -> list[str]:
        folder, names = self._folder(key), self.names(key)
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            there = pool.map(self._bucket.facts, [f"{folder}{n}/{MANIFEST}" for n in names])
        return [name for name, facts in zip(names, there, strict=True) if facts]

    def size(self, key: str) -> int | None:
        facts = self._bucket.facts(self._name(key))
        return facts.size if facts else None

    def checksum(self, key: str) -> str | None:
        """As its writer recorded it, with the server's check of what arrived; else of a copy."""
        facts = self._bucket.facts(self._name(key))
        if facts and not facts.sha256:
            return sha256_of(self.local(key))
        return facts.sha256 if facts else None

    def read(self, key: str) -> bytes:
        return self._bucket.get(self._name(key))

    def write(self, key: str, data: bytes) -> None:
        self._bucket.put(self._name(key), data)

    def remove(self, key: str) -> None:
        self._bucket.remove(self._manifest_first(key))
        self._cache.drop(key)

    def move(self, key: str, target: str) -> None:
        """Copy, the manifest last, then remove, the manifest first."""
        length = len(self._name(key))
        names = self._manifest_first(key)
        if not names:
            raise FileNotFoundError(f"There is no {key} in {self.uri}.")
        for name in reversed(names):
            self._bucket.copy(name, self._name(target) + name[length:])
        self.remove(key)

    def local(self, key: str) -> Path:
        """A copy in the cache. Raises Corrupt where a file is not what its checksum says."""
        name, path = self._name(key), self._cache.root / key
        if facts := self._bucket.facts(name):
            return self._file(key, facts)
        try:
            manifest = self.read(f"{key}/{MANIFEST}")
        except FileNotFoundError:
            return self._joined(key) or self._absent(key)
        try:
            files = listed(manifest, path.name)
            for file, (size, sha256) in files.items():
                self._member(key, file, size, sha256)
            self._cache.keep_only(key, {MANIFEST, *files})
        finally:
            self._cache.put(f"{key}/{MANIFEST}", manifest)
        return path

    def forget(self, key: str) -> None:
        self._cache.drop(key)

    def scratch(self) -> Path:
        return self._cache.scratch()

    @contextmanager
    def new_folder(self, key: str, facts: dict[str, object] | None = None) -> Iterator[Path]:
        """Yield a directory of this machine; at the end upload it, its manifest last.

        A folder of the same key is gone for readers while the new one is on its way.
        """
        place = self.scratch() / uuid4().hex
        folder = place / Path(key).name
        folder.mkdir(parents=True)
        try:
            with named(folder, self._cache.root / key):
                yield folder
                seal(folder, facts)
            self._upload(key, folder)
            self._cache.adopt(key, folder)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def mirror(self, key: str, turn: int) -> Segments:
        path = self.scratch() / Path(key).name
        path.unlink(missing_ok=True)
        if joined := self._joined(key):
            shutil.copyfile(joined, path)
        # Turns begin anew where somebody removed the lease by hand; what was written stays.
        numbers = [name.partition("-")[0] for name in self.names(f"{key}{PARTS}")]
        newest = max((int(number) for number in numbers if number.isdecimal()), default=0)
        return Segments(path, key, max(turn, newest + 1), self.write)

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """There is none."""
        yield False

    def sweep(self) -> None:
        """Remove snapshots that have no manifest, and parts of uploads that were never ended."""
        key = "snapshots"
        for name in set(self.names(key)) - set(self.sealed(key)):
            self.remove(f"{key}/{name}")
        try:
            self._bucket.abort_uploads(self._folder(key))
        except Unreachable as error:
            warn(f"Uploads that were cut short are not swept: {error}")

    def sweep_staged(self) -> None:
        """Nothing: what has no manifest yet may be on its way."""

    def read_tagged(self, key: str) -> Tagged | None:
        try:
            found, data = self._quick.answer(self._name(key))
        except FileNotFoundError:
            return None
        except Corrupt as error:  # its readers wait for what does not answer, as it should
            raise Unreachable(str(error)) from error
        # Both times are the server's: clocks of other machines don't matter.
        now = parsedate_to_datetime(found["ResponseMetadata"]["HTTPHeaders"]["date"])
        return Tagged(data, found["ETag"], max(0.0, (now - found["LastModified"]).total_seconds()))

    def write_if(self, key: str, data: bytes, tag: str | None) -> str:
        if self._conditional:
            try:
                return put_if(self._quick, self._name(key), data, tag, {})
            except NotImplementedError:
                self._conditional = False
                warn(_NO_CONDITIONS)
        there = self.read_tagged(key)
        if (there.tag if there else None) != tag:
            raise Changed
        return self._quick.put(self._name(key), data)

    def _check(self) -> None:
        """A list has a reason where it is refused; a look at the bucket alone has none."""
        client = self._quick.client
        try:
            with self._quick.told(self._prefix):
                client.list_objects_v2(Bucket=self._quick.name, Prefix=self._prefix, MaxKeys=1)
        except FileNotFoundError:
            raise Unreachable(
                f"What answers at {client.meta.endpoint_url} knows no bucket {self._quick.name!r}, "
                "or is no S3 server: look at AWS_ENDPOINT_URL."
            ) from None

    def _name(self, key: str) -> str:
        return self._prefix + key

    def _folder(self, key: str) -> str:
        return f"{self._prefix}{key}/" if key else self._prefix

    def _manifest_first(self, key: str) -> list[str]:
        """Every object of a key: a folder's files, the file itself, a growing file's parts."""
        name = self._name(key)
        below = self._bucket.below(f"{name}/")
        manifest = [one for one in below if one == f"{name}/{MANIFEST}"]
        rest = [one for one in below if one not in manifest]
        own = [name] if self._bucket.facts(name) else []
        return [*manifest, *rest, *own, *self._bucket.below(f"{name}{PARTS}/")]

    def _file(self, key: str, facts: Facts) -> Path:
        """A copy of one object; without a recorded checksum its length alone can be checked."""
        if facts.sha256:
            return self._fetch(key, facts.size, facts.sha256)
        path = self._cache.put(key, self.read(key))
        if path.stat().st_size != facts.size:
            raise Corrupt(f"{key} has {path.stat().st_size} bytes; {facts.size} were written.")
        return path

    def _fetch(self, key: str, size: int, sha256: str) -> Path:
        return self._cache.fetch(key, size, sha256, partial(self._bucket.download, self._name(key)))

    def _member(self, key: str, file: str, size: int, sha256: str) -> None:
        try:
            self._fetch(f"{key}/{file}", size, sha256)
        except FileNotFoundError:
            raise Corrupt(f"{Path(key).name} lacks its file {file}.") from None

    def _joined(self, key: str) -> Path | None:
        """The copy of a growing file, made of its segments."""
        folder = f"{key}{PARTS}"
        names = self.names(folder)
        parts = [self.read(f"{folder}/{name}") for name in names]
        return self._cache.put(key, assemble(parts)) if names else None

    def _absent(self, key: str) -> Path:
        """The path that a copy would have, were there anything."""
        path = self._cache.root / key
        if path.is_file() or (path / MANIFEST).is_file():
            self._cache.drop(key)
        return path

    def _upload(self, key: str, folder: Path) -> None:
        """The old manifest goes first and the new one comes last: no reader meets a mixture."""
        manifest = (folder / MANIFEST).read_bytes()
        names = {f"{self._name(key)}/{file}" for file in listed(manifest, folder.name)}
        last = f"{self._name(key)}/{MANIFEST}"
        old = self._bucket.below(f"{self._name(key)}/")
        self._bucket.remove(name for name in old if name == last)
        for name in sorted(names):
            self._bucket.upload(name, folder / name[len(self._name(key)) + 1 :])
        self._bucket.remove(name for name in old if name not in names and name != last)
        try:
            self._bucket.put_new(last, manifest)
        except NotImplementedError:
            self._bucket.put(last, manifest)
        except Changed:
            raise Unreachable(
                f"Another process wrote {self.uri}/{key} at the same time; its files stay."
            ) from None
