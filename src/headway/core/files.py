"""Folders and files of a process: private ones, temporary ones that the next process cleans up, locks, and files that a
command reads and writes for the user, and JSON objects in them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, BinaryIO

from headway.core.errors import CheckpointError, ConfigError

# Temporary folder of one process, for sockets; removed on close, or after a kill by the next process.
#
# A process that is killed cannot remove its folder. So each folder holds a locked file; the system frees the lock when
# its process ends, however it ends, and the next `ScratchFolder` of the same prefix removes folders whose lock is free.

_LOCK = "lock"
_LONGEST = 75
"""Characters of the temporary folder's path: a socket's may have 107, and its name and the folder's come behind."""
_YOUNG_S = 60.0
"""Youngest age at which a folder without a held lock is removed: a younger one may be about to take its lock."""


class ScratchFolder:
    """`path` exists until `close`. `prefix`: what the folder's name starts with; only such are ever removed.

    ConfigError where the temporary folder's path is too long for a socket's."""

    def __init__(self, prefix: str) -> None:
        root = Path(tempfile.gettempdir())
        if len(os.fsencode(root)) > _LONGEST:
            raise ConfigError(
                f"the temporary folder {root} has a path of {len(os.fsencode(root))} characters, too long for sockets "
                f"in it (at most {_LONGEST}): set TMPDIR to a shorter one"
            )
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        # Held until the process ends, however it ends.
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _sweep(root, prefix, os.fstat(self._lock).st_mtime - _YOUNG_S)

    def close(self) -> None:
        """Remove the folder. Harmless when repeated."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep(root: Path, prefix: str, before: float) -> None:
    """Remove this user's folders of that prefix, made `before`, whose process has ended; others stay."""
    for lock in root.glob(f"{prefix}*/{_LOCK}"):
        try:
            found = lock.stat()
            # The temporary folder is shared: never follow a link or touch another user's files.
            if lock.parent.is_symlink() or found.st_uid != os.getuid() or found.st_mtime > before:
                continue
            held = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(held)


ATTEMPTS, PAUSE_S = 100, 0.05
"""How often to try for a lock, and the seconds between: an engine whose server was killed may hold it that long."""


def lock(descriptor: int, attempts: int) -> None:
    """Lock an open file, waiting for its holder for so many pauses. Raises BlockingIOError after that."""
    pause = threading.Event()
    for attempt in range(attempts + 1):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt == attempts:
                raise
            pause.wait(PAUSE_S)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
            return  # a file system without locks


LOCK = "lock"
PART = ".part"
"""End of the name of a file that is being written. After a crash one may be left."""
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateFolder:
    """The folder `path`, created when missing, and its lock. All files in it are opened relative to it.

    ours: beginnings of the names of the files that it holds; flag: the setting that names it, for errors. Raises
    ConfigError when another process has it, when it is a link or another user's, when it cannot be written, or when it
    cannot be made private because other files are in it.
    """

    def __init__(self, path: Path, ours: tuple[str, ...], flag: str) -> None:
        self.path = path
        self._flag = flag
        self._descriptor = self._lock = -1
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
            self._make_private((LOCK, *ours))
            self._lock = self.open(LOCK, os.O_CREAT | os.O_RDWR)
        except OSError as error:
            self.close()
            # O_NOFOLLOW and O_DIRECTORY say ELOOP or ENOTDIR for a link.
            why = "it is a link, and links are not followed" if path.is_symlink() else error.strerror
            raise ConfigError(f"{flag} {path}: {why}; give a folder that can be written to") from error
        except BaseException:
            self.close()
            raise
        try:
            lock(self._lock, 0)
        except OSError:
            self.close()
            raise ConfigError(f"{flag} {path}: another server writes to it; give each its own folder") from None

    def open(self, name: str, flags: int) -> int:
        """Open a file of the folder, for its owner only. Raises OSError for a link, a pipe or a device."""
        file = os.open(name, flags | os.O_NONBLOCK | _FLAGS, 0o600, dir_fd=self._descriptor)
        try:
            _check_regular(file, f"{name} in it")
            os.fchmod(file, 0o600)
        except BaseException:
            os.close(file)
            raise
        return file

    def read(self, name: str) -> bytes:
        """Return a file's contents. Raises OSError for a link, and where there is none."""
        with os.fdopen(self.open(name, os.O_RDONLY), "rb") as stream:
            return stream.read()

    def names(self) -> list[str]:
        """Return the names of all that the folder holds, sorted."""
        return sorted(os.listdir(self._descriptor))

    def write(self, name: str, data: bytes) -> None:
        """Write a file durably: until all of it is on the disk, the name stands for what it stood for before.

        Raises OSError, and leaves no part behind."""
        part = f"{name}{PART}"
        try:
            file = self.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            try:
                _write(file, data)
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(part, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
            os.fsync(self._descriptor)
        except OSError:
            with suppress(OSError):
                self.remove(part)
            raise

    def append(self, name: str, data: bytes) -> None:
        """Append to a file that is there. Raises OSError, and appends nothing then."""
        file = os.open(name, os.O_WRONLY | os.O_APPEND | _FLAGS, dir_fd=self._descriptor)
        try:
            size = os.fstat(file).st_size
            try:
                _write(file, data)
            except OSError:
                os.ftruncate(file, size)
                raise
        finally:
            os.close(file)

    def sync(self, name: str) -> None:
        """Bring what was appended to a file to the disk. Raises OSError."""
        file = os.open(name, os.O_WRONLY | _FLAGS, dir_fd=self._descriptor)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        for each in (self._lock, self._descriptor):
            if each >= 0:
                os.close(each)
        self._lock = self._descriptor = -1

    def _make_private(self, ours: tuple[str, ...]) -> None:
        found = os.fstat(self._descriptor)
        if found.st_uid != os.geteuid():
            raise ConfigError(f"{self._flag} {self.path}: it is another user's folder; give one of your own")
        if stat.S_IMODE(found.st_mode) & 0o077 == 0:
            return
        others = sorted(name for name in os.listdir(self._descriptor) if not name.startswith(ours))
        if others:
            raise ConfigError(
                f"{self._flag} {self.path}: other users may enter it and it holds {others[0]!r} besides; give a folder "
                "of its own"
            )
        os.fchmod(self._descriptor, 0o700)


def _write(file: int, data: bytes) -> None:
    """Write all of the data: a call may take less than it was given, on a nearly full disk for example."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _check_regular(file: int, name: str) -> None:
    """Raise OSError for an open pipe or device, from which reading may never end, and for a folder.

    It is opened with O_NONBLOCK, which does not wait for the other end of a pipe."""
    mode = os.fstat(file).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"{name} is not a regular file: copy what it gives to one", name)


MOST_BYTES = 64 << 20
"""Most bytes of a file that is read whole. The longest ones, tokenizers and lists of tensors, have about 30 MB."""
LONGEST_LINE = 16 << 20


def open_input(path: str | Path) -> BinaryIO:
    """Open a file that a user names. Raises OSError, also for a pipe, a device or a folder."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(file, str(path))
    except OSError:
        os.close(file)
        raise
    return os.fdopen(file, "rb")


def read_input(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Return a file's contents. Raises OSError as `open_input`, and for more than so many bytes."""
    with open_input(path) as file:
        if os.fstat(file.fileno()).st_size <= most and len(data := file.read(most + 1)) <= most:
            return data
    raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))


def read_lines(path: str | Path) -> Iterator[bytes]:
    """Yield a file's lines with their ends. Raises OSError as `open_input`, and for a line of too many bytes."""
    with open_input(path) as file:
        while line := file.readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE:
                raise OSError(errno.EFBIG, f"it has a line of more than {LONGEST_LINE >> 20} MiB", str(path))
            yield line


def open_output(path: str | Path) -> int:
    """Open a file to append to; made when missing. Raises OSError, also for a pipe without a reader."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is a pipe without a reader", str(path)) from None
        raise
    os.set_blocking(file, True)
    return file


def check_outputs(*files: Path | None) -> None:
    """Make the folders of files that will be written, before the work whose results they are to hold.

    None and `-` (stdout) are passed over. Raises ConfigError where a file cannot be written.
    """
    for file in files:
        if file is None or str(file) == "-":
            continue
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                file.stat()
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}") from error
        if file.is_dir():
            raise ConfigError(f"cannot write {file}: it is a folder; name a file in it")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ConfigError(f"cannot write {file}: permission denied")


def write_output(file: Path, body: bytes) -> None:
    """Write a file whole, under another name first: an interrupted run leaves no half of one. `-` is stdout.

    Raises ConfigError."""
    if str(file) == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(body)
        return
    check_outputs(file)
    # A link is kept, and what it names is written.
    file = Path(os.path.realpath(file))
    scratch = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        # A pipe, /dev/stdout and other special files are written in place.
        if file.exists() and not file.is_file():
            with os.fdopen(open_output(file), "wb") as special:
                special.write(body)
        else:
            scratch.write_bytes(body)
            scratch.replace(file)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error


# JSON objects in files that come with a model: read whole, their fields by type and within limits.

MOST_COUNTED = 1 << 31
"""Layers, heads, tokens, entries of a vocabulary: no model has more of any."""
_MOST = 1e12


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError where there is none."""
    try:
        data = json.loads(read_input(path).decode())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not a {type(data).__name__}")
    return data


@dataclass(frozen=True, slots=True)
class JsonFields:
    """Typed reader of a JSON object. A field that is null counts as absent."""

    data: Mapping[str, Any]
    origin: str
    """Name of the object in errors, usually its file."""

    def number(self, name: str, default: float | None = None, least: float = -_MOST, most: float = _MOST) -> float:
        """Return a number within limits. Raises CheckpointError when it is absent without a default, or no such."""
        value = self._value(name, default)
        if not _is_number(value, least, most):
            raise self.wrong(name, f"a number from {least:g} to {most:g}")
        return float(value)

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer from `least` to `MOST_COUNTED`. Raises CheckpointError as `number`."""
        value = self._value(name, default)
        if not isinstance(value, int) or not _is_number(value, least, MOST_COUNTED):
            raise self.wrong(name, f"an integer from {least} to {MOST_COUNTED}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean. Raises CheckpointError as `number`."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def numbers(self, name: str, least: float = -_MOST) -> tuple[float, ...]:
        """Return a list of numbers of at least `least`. Raises CheckpointError as `number`."""
        value = self._value(name, None)
        if not isinstance(value, list) or not all(_is_number(item, least, _MOST) for item in value):
            raise self.wrong(name, f"a list of numbers from {least:g} to {_MOST:g}")
        return tuple(float(item) for item in value)

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self.data.get(name) is not None

    def wrong(self, name: str, wanted: str) -> CheckpointError:
        """Return the error that names the field, what was expected and what was found."""
        return CheckpointError(f"{self.origin}: '{name}' must be {wanted}, not {shortened(self.data.get(name))}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.origin}: '{name}' is missing")
        return default


def _is_number(value: Any, least: float, most: float) -> bool:
    # Not a number (NaN) is within no limits.
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
