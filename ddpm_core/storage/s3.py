"""s3://bucket/prefix as storage.

S3 can neither rename nor append. A folder is uploaded file by file and its manifest last: for
readers, a folder without a manifest does not exist. A growing file is a series of segments. Files
that are read by path are downloaded to a local cache once, and checked.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from uuid import uuid4

from ddpm_core.console import Outage, warn
from ddpm_core.errors import Corrupt
from ddpm_core.storage.base import Changed, Tagged, Unreachable
from ddpm_core.storage.bucket import CONNECTIONS, Bucket, ObjectInfo, connect, split
from ddpm_core.storage.cache import Cache
from ddpm_core.storage.manifest import MANIFEST, parse_manifest, seal, sha256_of
from ddpm_core.storage.retry import QUICK
from ddpm_core.storage.staging import named

PARTS = ".parts"  # the segments of a growing file KEY are in the folder KEY.parts
SEGMENT = 2**20  # bytes after which a new segment begins
INTERVAL = 10.0  # seconds between two uploads of a growing file
_NO_CONDITIONS = (
    "This S3 server does not support conditional writes. Two runs that start in the same workspace "
    "at the same moment may not notice each other."
)


class S3Storage:
    """A prefix of a bucket. Objects outside `prefix/` are never touched."""

    def __init__(self, uri: str) -> None:
        """Raises Unreachable if the server, the bucket or the permissions are missing."""
        bucket, prefix = split(uri, "workspace")
        prefix = prefix.strip("/")
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._quick = Bucket(connect(QUICK), bucket)
        self._check()
        self._bucket = Bucket(connect(), bucket)
        self._cache = Cache(f"{self._bucket.client.meta.endpoint_url} {self.uri}")
        self._conditional = True

    def exists(self, key: str) -> bool:
        name = self._name(key)
        if self._bucket.info(name) or self._bucket.info(f"{name}/{MANIFEST}"):
            return True
        return bool(self._bucket.level(f"{name}{PARTS}/"))

    def names(self, key: str) -> list[str]:
        found = self._bucket.level(self._folder(key))
        return sorted(name for name in found if not name.startswith("."))

    def sealed(self, key: str) -> list[str]:
        folder, names = self._folder(key), self.names(key)
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            found = pool.map(self._bucket.info, [f"{folder}{n}/{MANIFEST}" for n in names])
        return [name for name, info in zip(names, found, strict=True) if info]

    def size(self, key: str) -> int | None:
        info = self._bucket.info(self._name(key))
        return info.size if info else None

    def checksum(self, key: str) -> str | None:
        """Return the SHA-256 that the writer recorded; without one, hash a local copy."""
        info = self._bucket.info(self._name(key))
        if info and not info.sha256:
            return sha256_of(self.local(key))
        return info.sha256 if info else None

    def read(self, key: str) -> bytes:
        return self._bucket.get(self._name(key))

    def write(self, key: str, data: bytes) -> None:
        self._bucket.put(self._name(key), data)

    def remove(self, key: str) -> None:
        self._bucket.remove(self._manifest_first(key))
        self._cache.drop(key)

    def move(self, key: str, target: str) -> None:
        """Copy with the manifest last, then remove with the manifest first."""
        length = len(self._name(key))
        names = self._manifest_first(key)
        if not names:
            raise FileNotFoundError(f"{self.uri}/{key} does not exist.")
        for name in reversed(names):
            self._bucket.copy(name, self._name(target) + name[length:])
        self.remove(key)

    def local(self, key: str) -> Path:
        """Return the path of a copy in the cache. Raises Corrupt if a checksum does not match."""
        name, path = self._name(key), self._cache.root / key
        if info := self._bucket.info(name):
            return self._file(key, info)
        try:
            manifest = self.read(f"{key}/{MANIFEST}")
        except FileNotFoundError:
            return self._joined(key) or self._missing(key)
        try:
            files = parse_manifest(manifest, path.name).files
            for file, record in files.items():
                try:
                    self._fetch(f"{key}/{file}", record.size, record.sha256)
                except FileNotFoundError:
                    raise Corrupt(f"{Path(key).name}/{file} is missing.") from None
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
        """Yield a local directory, and upload it at the end.

        Readers see no folder under `key` during the upload.
        """
        place = self.scratch() / uuid4().hex
        folder = place / Path(key).name
        folder.mkdir(parents=True)
        try:
            # Disk-full errors name the place where the copy will be.
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
        # If the lease was removed by hand, turns restart at 1; existing segments must stay.
        numbers = [name.partition("-")[0] for name in self.names(f"{key}{PARTS}")]
        newest = max((int(number) for number in numbers if number.isdecimal()), default=0)
        return Segments(path, key, max(turn, newest + 1), self.write)

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Yield False: S3 has no locks."""
        yield False

    def sweep(self) -> None:
        """Remove snapshots without a manifest, and the parts of unfinished uploads."""
        key = "snapshots"
        for name in set(self.names(key)) - set(self.sealed(key)):
            self.remove(f"{key}/{name}")
        try:
            self._bucket.abort_uploads(self._folder(key))
        except Unreachable as error:
            warn(f"Could not remove unfinished uploads: {error}")

    def sweep_staged(self) -> None:
        """Do nothing: another process may be uploading a folder that has no manifest yet."""

    def read_tagged(self, key: str) -> Tagged | None:
        try:
            found, data = self._quick.get_response(self._name(key))
        except FileNotFoundError:
            return None
        except Corrupt as error:  # callers handle Unreachable, and try again later
            raise Unreachable(str(error)) from error
        # Both times are the server's, so the clocks of other machines do not matter.
        now = parsedate_to_datetime(found["ResponseMetadata"]["HTTPHeaders"]["date"])
        return Tagged(data, found["ETag"], max(0.0, (now - found["LastModified"]).total_seconds()))

    def write_if(self, key: str, data: bytes, tag: str | None) -> str:
        if self._conditional:
            try:
                return self._quick.put_if(self._name(key), data, tag, {})
            except NotImplementedError:
                self._conditional = False
                warn(_NO_CONDITIONS)
        # Not atomic: between this comparison and the write another process may write as well.
        current = self.read_tagged(key)
        if (current.tag if current else None) != tag:
            raise Changed
        return self._quick.put(self._name(key), data)

    def _check(self) -> None:
        """Raise Unreachable unless the prefix can be listed.

        A refused list request has a reason in its response; head_bucket has none.
        """
        client = self._quick.client
        try:
            with self._quick.translate(self._prefix):
                client.list_objects_v2(Bucket=self._quick.name, Prefix=self._prefix, MaxKeys=1)
        except FileNotFoundError:
            raise Unreachable(
                f"The server at {client.meta.endpoint_url} has no bucket {self._quick.name!r}, or "
                "is not an S3 server. Check AWS_ENDPOINT_URL."
            ) from None

    def _name(self, key: str) -> str:
        return self._prefix + key

    def _folder(self, key: str) -> str:
        return f"{self._prefix}{key}/" if key else self._prefix

    def _manifest_first(self, key: str) -> list[str]:
        """Return all objects of a key: a folder's files, the file itself, its segments."""
        name = self._name(key)
        below = self._bucket.below(f"{name}/")
        manifest = [one for one in below if one == f"{name}/{MANIFEST}"]
        rest = [one for one in below if one not in manifest]
        own = [name] if self._bucket.info(name) else []
        return [*manifest, *rest, *own, *self._bucket.below(f"{name}{PARTS}/")]

    def _file(self, key: str, info: ObjectInfo) -> Path:
        """Return a copy of one object. Without a recorded checksum, only its size is checked."""
        if info.sha256:
            return self._fetch(key, info.size, info.sha256)
        path = self._cache.put(key, self.read(key))
        if path.stat().st_size != info.size:
            raise Corrupt(f"{key} has {path.stat().st_size} bytes; {info.size} were written.")
        return path

    def _fetch(self, key: str, size: int, sha256: str) -> Path:
        return self._cache.fetch(key, size, sha256, partial(self._bucket.download, self._name(key)))

    def _joined(self, key: str) -> Path | None:
        """Return a copy of a growing file, joined from its segments; None if there are none."""
        folder = f"{key}{PARTS}"
        names = self.names(folder)
        parts = [self.read(f"{folder}/{name}") for name in names]
        return self._cache.put(key, assemble(parts)) if names else None

    def _missing(self, key: str) -> Path:
        """Return the path of a key that does not exist, after its old copy is removed."""
        path = self._cache.root / key
        if path.is_file() or (path / MANIFEST).is_file():
            self._cache.drop(key)
        return path

    def _upload(self, key: str, folder: Path) -> None:
        """Remove the old manifest first and write the new one last, so that readers never mix."""
        manifest = (folder / MANIFEST).read_bytes()
        names = {
            f"{self._name(key)}/{file}" for file in parse_manifest(manifest, folder.name).files
        }
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
                f"Another process wrote {self.uri}/{key} at the same time. Its files were kept."
            ) from None


class Segments:
    """A growing file in S3: the lines appended to a local file are uploaded as segments.

    A segment is KEY.parts/TURN-NUMBER. A run's turn is its lease's fence, so no two runs write the
    same segment. The last segment of a turn is uploaded again as it grows; the others are final.
    """

    def __init__(
        self, path: Path, key: str, turn: int, write: Callable[[str, bytes], None]
    ) -> None:
        self.path = path
        self._key, self._turn, self._write = key, turn, write
        self._number, self._start, self._written = 0, 0, 0
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._push_often, name="mirror", daemon=True)
        self._outage = Outage()

    def start(self) -> None:
        """Upload what is appended from now on, every INTERVAL seconds."""
        self._start = self.path.stat().st_size if self.path.exists() else 0
        self._thread.start()

    def push(self) -> None:
        """Upload all complete lines now. Raises OSError."""
        with self._lock:
            while data := self._pending():
                self._write(segment(self._key, self._turn, self._number), data)
                self._written = len(data)
                if len(data) < SEGMENT:
                    break
                self._number += 1
                self._start += len(data)
                self._written = 0

    def close(self) -> None:
        """Upload the rest. Raises OSError."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self.push()

    def _pending(self) -> bytes:
        """Return the content of the current segment, or b"" if all of it is uploaded."""
        if not self.path.exists():
            return b""
        with self.path.open("rb") as file:
            file.seek(self._start)
            data = file.read(SEGMENT)
            data += file.readline() if len(data) == SEGMENT else b""
        # A line that is only partly written waits for the next segment.
        lines = data[: data.rfind(b"\n") + 1]
        return lines if len(lines) > self._written else b""

    def _push_often(self) -> None:
        while not self._closing.wait(INTERVAL):
            try:
                self.push()
            except Unreachable as error:
                self._outage.begins(f"{error} The log is uploaded when the server is back.")
            except OSError as error:
                warn(f"Cannot read the log: {error.strerror}.")
            else:
                self._outage.ends("Uploading the log again.")


def segment(key: str, turn: int, number: int) -> str:
    """Return the key of a segment. Keys in order give the file."""
    return f"{key}{PARTS}/{turn:08d}-{number:04d}"


def assemble(parts: list[bytes]) -> bytes:
    """Join segments to a file. A partial line from a killed run ends with its segment."""
    return b"".join(part if part.endswith(b"\n") or not part else part + b"\n" for part in parts)
