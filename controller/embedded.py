"""A PostgreSQL of our own: made, started and stopped without touching any other.

CREATE EXTENSION only finds files below the server's own directories, and those belong to the system. But
PostgreSQL looks for them relative to its executable, so a private tree does: copies of three executables,
links to everything the system has, and our extension beside them. No installing, no root, and as many
clusters at once as one likes.

    cluster/
        server/      the private tree
        pgdata/      the data, readable by the server's user only
        server.log
        socket       where the socket directory is, while the server runs
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import os
import pwd
import re
import shutil
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Union
from urllib.parse import quote

import psycopg2

from bismarck_dp import errors
from bismarck_dp.errors import BismarckError

PathLike = Union[str, "os.PathLike[str]"]

DATABASE = "bismarck"
PORT = 5432  # only names the socket file: nothing listens on the network
EXECUTABLES = ("postgres", "initdb", "pg_ctl")
START_SECONDS = 300  # recovery after a crash may replay a lot
STOP_SECONDS = 30
NO_PROCESS = (1 << 22) + 1  # beyond the largest process number of Linux
OBSTRUCTIVE = set('"$`\\\n')  # initdb and pg_ctl hand their paths to a shell between double quotes

# No password is asked for: the socket lies in a directory of mode 0700, which only the server's user and root
# can enter.
FIXED_SETTINGS = {"listen_addresses": "", "port": str(PORT), "unix_socket_permissions": "0700"}
# Parallel queries may not take the workers that enter debits.
DEFAULT_SETTINGS = {"shared_buffers": "256MB", "max_worker_processes": "24", "max_parallel_workers": "8"}
VOLATILE_SETTINGS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


def default_home() -> Path:
    """Where the cluster lies when nobody says: a place the server's user can enter, also when we are root."""
    if os.geteuid() == 0:
        return Path("/var/lib/bismarck_dp/cluster")
    return Path.home() / ".local/share/bismarck_dp"


def extension_files(directory: Path | None = None) -> list[Path]:
    """The extension's library, control and SQL files: by default those `make env` left beside this Python."""
    directory = directory or Path(sys.prefix, "share/bismarck_dp")
    found = sorted(file for suffix in ("so", "control", "sql") for file in directory.glob(f"*.{suffix}"))
    if not {".control", ".sql"} <= {file.suffix for file in found}:
        raise BismarckError(f"the extension's files are not in {directory}", "`make env` builds them")
    return found


@dataclass(frozen=True)
class _Installation:
    """The system's PostgreSQL, which is read and never written."""

    bindir: Path
    sharedir: Path
    pkglibdir: Path
    major: str

    @classmethod
    def find(cls) -> _Installation:
        command = [_pg_config(), "--bindir", "--sharedir", "--pkglibdir", "--version"]
        try:
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        except (OSError, subprocess.CalledProcessError) as error:
            raise BismarckError(f"{command[0]} does not run: {error}", "set PG_CONFIG to another") from error
        bindir, sharedir, pkglibdir = (Path(line).resolve() for line in answer[:3])
        found = cls(bindir, sharedir, pkglibdir, major=re.findall(r"\d+", answer[3])[0])
        found._check()
        return found

    def _check(self) -> None:
        package = f"apt-get install postgresql-{self.major}"
        for name in EXECUTABLES:
            if not (self.bindir / name).is_file():
                raise BismarckError(f"PostgreSQL's `{name}` is not in {self.bindir}", package)
        if not (self.pkglibdir / "plpython3.so").exists():
            package = f"apt-get install postgresql-plpython3-{self.major}"
            raise BismarckError(f"PL/Python is missing: no plpython3.so in {self.pkglibdir}", package)

    @property
    def root(self) -> Path:
        return Path(os.path.commonpath([self.bindir, self.sharedir, self.pkglibdir]))


def _pg_config() -> str:
    """PG_CONFIG, or the newest of Debian's, or whichever is on PATH."""
    chosen = os.environ.get("PG_CONFIG")
    if chosen:
        return chosen
    debian = [path for path in Path("/usr/lib/postgresql").glob("*/bin/pg_config") if path.parts[4].isdigit()]
    if debian:
        return str(max(debian, key=lambda path: int(path.parts[4])))
    on_path = shutil.which("pg_config")
    if on_path is None:
        raise BismarckError("no PostgreSQL is installed", "apt-get install postgresql-plpython3-15")
    return on_path


@dataclass(frozen=True)
class _Account:
    """Who the server runs as: ourselves, or somebody else when we are root, which PostgreSQL refuses."""

    entry: pwd.struct_passwd
    other: bool

    @classmethod
    def of(cls, pgdata: Path) -> _Account:
        """For root, the owner of the data when there is some (a plain user's, say), else `postgres`."""
        try:
            if os.geteuid() != 0:
                return cls(pwd.getpwuid(os.geteuid()), other=False)
            if pgdata.exists():
                return cls(pwd.getpwuid(pgdata.stat().st_uid), other=True)
            return cls(pwd.getpwnam("postgres"), other=True)
        except KeyError as error:
            message = f"PostgreSQL must run as a user the system knows and not as root: {error.args[0]}"
            raise BismarckError(message, "apt-get install postgresql-common makes `postgres`") from error

    def give(self, path: Path) -> None:
        """Make the server's user the owner; of a link, not of what it points to, which may be anything."""
        if self.other:
            os.chown(path, self.entry.pw_uid, self.entry.pw_gid, follow_symlinks=False)

    @property
    def identity(self) -> dict[str, Any]:
        """What subprocess needs to become this user."""
        if not self.other:
            return {}
        return {"user": self.entry.pw_uid, "group": self.entry.pw_gid, "extra_groups": []}

    def run(self, command: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        return subprocess.run(command, cwd="/", env=dict(env), check=False, **streams, **self.identity)

    def closed(self, leaf: Path) -> str:
        """The first directory on the way from / to `leaf` this user cannot enter; empty when none is."""
        if not self.other:
            return ""
        script = 'for d in "$@"; do [ -x "$d" ] || { printf %s "$d"; exit; }; done'
        way = [str(step) for step in (*reversed(leaf.parents), leaf) if step.exists()]
        return self.run(["/bin/sh", "-c", script, "sh", *way], os.environ).stdout

    def require(self, leaf: Path, what: str, hint: str) -> None:
        if closed := self.closed(leaf):
            who = f"user `{self.entry.pw_name}`, who runs the server"
            raise BismarckError(f"{closed}, on the way to {what}, cannot be entered by {who}", hint)


def _python_path(account: _Account) -> list[Path]:
    """What PL/Python must see to import the code that runs here: its packages, and a source tree we run from.

    Resolved, since the way through a symlinked virtual environment may be closed to the server's user. A
    source tree closed to that user is left out; the installed package serves then.
    """
    packages = [Path(sysconfig.get_path(scheme)).resolve() for scheme in ("purelib", "platlib")]
    source = Path(errors.__file__).resolve().parents[1]
    account.require(packages[0], "Python's packages", "`make env` makes an environment that user can read")
    if not account.closed(source):
        packages.insert(0, source)
    return list(dict.fromkeys(packages))


def _environment(account: _Account) -> dict[str, str]:
    """The server's environment: nothing that steers another PostgreSQL or Python, and our packages."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "PYTHON"))}
    env["PYTHONPATH"] = os.pathsep.join(map(str, _python_path(account)))
    if not site.ENABLE_USER_SITE:
        env["PYTHONNOUSERSITE"] = "1"
    # Threads inside a backend would receive its signals.
    env.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    if account.other:
        env.update(HOME=account.entry.pw_dir, USER=account.entry.pw_name, LOGNAME=account.entry.pw_name)
    return env


class Cluster:
    """A PostgreSQL cluster in a directory. As a context manager it stops what it started and leaves what ran.

    `settings` and new extension files take effect when the server starts; one that runs keeps its own.
    `durable=False` trades crash safety for speed: for tests and demonstrations.
    """

    def __init__(
        self,
        path: PathLike | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        durable: bool = True,
        extension: Path | None = None,
    ) -> None:
        # PostgreSQL resolves symlinks before it looks around, so we do too.
        self.path = Path(path if path is not None else default_home()).resolve()
        self.settings = _checked(settings or {})
        self.durable = durable
        self.extension = extension
        self._started = False
        if OBSTRUCTIVE & set(str(self.path)):
            raise BismarckError(f"PostgreSQL cannot live in {self.path}", 'a path without ", $, ` or \\')

    @property
    def pgdata(self) -> Path:
        return self.path / "pgdata"

    @property
    def log(self) -> Path:
        return self.path / "server.log"

    @property
    def started_here(self) -> bool:
        """True when this object started the server that runs, and so should stop it."""
        return self._started

    @property
    def running(self) -> bool:
        """True when the server answers. A process id is no proof: after a crash it may be a stranger's."""
        postmaster = self._postmaster()
        return postmaster is not None and _answers(postmaster[1])

    def start(self) -> None:
        """Start the server, making cluster and database on first use, or attach to the one that runs."""
        self._require_way(self.path.parent)
        with self._mendable(), self._locked():
            if self.running:
                self._ensure_database()
                return
            try:
                self._launch()
                self._ensure_database()
            except BaseException:
                self._halt()
                raise
            self._started = True

    def stop(self) -> None:
        """Stop the server, whoever started it, and remove its socket directory."""
        if self.pgdata.is_dir():
            with self._mendable(), self._locked():
                self._halt()
        self._started = False

    def url(self, user: str = "postgres", dbname: str = DATABASE) -> str:
        """An SQLAlchemy URL. The port is spelled out, or else PGPORT would decide."""
        who, where = quote(user, safe=""), quote(dbname, safe="")
        return f"postgresql+psycopg2://{who}@/{where}?host={self._socket()}&port={PORT}"

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.started_here:
            self.stop()

    @contextlib.contextmanager
    def _mendable(self) -> Iterator[None]:
        """A file we may not touch, or a full disk, is the user's to mend: say which."""
        try:
            yield
        except OSError as error:
            message = f"the cluster in {self.path} cannot be used: {error.strerror}: {error.filename}"
            raise BismarckError(message, "another directory, or the user it belongs to") from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time starts or stops this cluster."""
        self._make_home()
        with open(self.path / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _account(self) -> _Account:
        return _Account.of(self.pgdata)

    def _require_way(self, directory: Path) -> None:
        hint = f"a cluster elsewhere, such as {default_home()}"
        self._account().require(directory, f"the cluster in {self.path}", hint)

    def _make_home(self) -> None:
        """The directory itself. An empty one is ours to open for the server's user; no other is changed."""
        if (self.path / "PG_VERSION").exists():
            raise BismarckError(f"{self.path} is the data of another PostgreSQL", "choose another directory")
        account = self._account()
        _make_directories(self.path, account)
        if account.other and not any(self.path.iterdir()):
            self.path.chmod(self.path.stat().st_mode | 0o055)

    def _postmaster(self) -> tuple[int, Path] | None:
        """Process id and socket directory, by the server's own account; it need not be alive."""
        try:
            lines = (self.pgdata / "postmaster.pid").read_text().splitlines()
            return int(lines[0]), Path(lines[4])
        except (OSError, IndexError, ValueError):
            return None

    def _socket(self) -> Path:
        postmaster = self._postmaster()
        if postmaster is None:
            raise BismarckError(f"the server in {self.path} does not run", "start() it first")
        return postmaster[1]

    def _launch(self) -> None:
        installation, account = _Installation.find(), self._account()
        self._require_way(self.path)
        env = _environment(account)
        self._forget_socket()
        binaries = self._build_tree(installation, account)
        if not self.pgdata.exists():
            self._initialise(binaries, account, env)
        self._check_data(installation)
        self._bury(account)
        self._configure(account)
        self._run_server(binaries, account, env)

    def _build_tree(self, installation: _Installation, account: _Account) -> Path:
        """Bring the private tree in line with system and extension; returns its directory of executables."""
        files = extension_files(self.extension)
        libraries = [file for file in files if file.suffix == ".so"]
        scripts = [file for file in files if file.suffix != ".so"]

        def inside(directory: Path) -> Path:
            target = self.path / "server" / directory.relative_to(installation.root)
            _make_directories(target, account)
            return target

        share, extension = inside(installation.sharedir), inside(installation.sharedir / "extension")
        _mirror(installation.sharedir, share, [], skip="extension")
        _mirror(installation.sharedir / "extension", extension, scripts)
        _mirror(installation.pkglibdir, inside(installation.pkglibdir), libraries)
        binaries = inside(installation.bindir)
        for name in EXECUTABLES:
            _copy(installation.bindir / name, binaries / name, 0o755)
        return binaries

    def _initialise(self, binaries: Path, account: _Account, env: Mapping[str, str]) -> None:
        """initdb under another name, renamed when whole: a half-made cluster is never taken for one."""
        draft = self.path / "pgdata.new"
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(mode=0o700)
        account.give(draft)
        command = [str(binaries / "initdb"), "-D", str(draft), "-U", "postgres", "-E", "UTF8", "--no-locale"]
        command += ["--auth-local=trust", "--auth-host=reject"]
        outcome = account.run(command + ([] if self.durable else ["--no-sync"]), env)
        if outcome.returncode != 0:
            raise BismarckError(f"initdb failed in {self.path}:\n{outcome.stderr.strip()}")
        with open(draft / "postgresql.conf", "a") as conf:
            conf.write("\ninclude 'bismarck_dp.conf'\n")
        (draft / "bismarck_dp.conf").touch()
        draft.rename(self.pgdata)

    def _check_data(self, installation: _Installation) -> None:
        if not (self.pgdata / "bismarck_dp.conf").exists():
            raise BismarckError(f"{self.pgdata} was not made by bismarck_dp", "choose another directory")
        version = (self.pgdata / "PG_VERSION").read_text().strip()
        if version != installation.major:
            message = f"{self.path} needs PostgreSQL {version}, and {installation.bindir} is {installation.major}"
            raise BismarckError(message, f"set PG_CONFIG to that of {version}, or choose another directory")

    def _bury(self, account: _Account) -> None:
        """Tell PostgreSQL that a killed server is dead when it stays a zombie (a container without init).

        Only the process number is changed, to one no process has: by the rest of the file PostgreSQL makes
        sure that none of the dead server's children still uses the data.
        """
        postmaster = self._postmaster()
        if postmaster is not None and _is_zombie(postmaster[0]):
            file = self.pgdata / "postmaster.pid"
            _write(file, f"{NO_PROCESS}\n" + file.read_text().partition("\n")[2], 0o600)
            account.give(file)

    def _configure(self, account: _Account) -> None:
        """Write the settings and make the socket directory, in /tmp: its path may have 107 bytes at most."""
        directory = Path(tempfile.mkdtemp(prefix="bismarck_dp.", dir="/tmp"))
        account.give(directory)
        _write(self.path / "socket", str(directory), 0o644)
        settings = {**DEFAULT_SETTINGS, **({} if self.durable else VOLATILE_SETTINGS), **self.settings}
        settings.update(FIXED_SETTINGS, unix_socket_directories=str(directory))
        lines = [f"{name} = {_quoted(value)}\n" for name, value in settings.items()]
        conf = self.pgdata / "bismarck_dp.conf"
        _write(conf, "".join(lines), 0o600)
        account.give(conf)

    def _run_server(self, binaries: Path, account: _Account, env: Mapping[str, str]) -> None:
        self.log.touch(mode=0o600)
        account.give(self.log)
        before = self.log.stat().st_size
        command = [str(binaries / "pg_ctl"), "start", "-s", "-w", "-t", str(START_SECONDS)]
        outcome = account.run([*command, "-D", str(self.pgdata), "-l", str(self.log)], env)
        if outcome.returncode != 0:
            with open(self.log, errors="replace") as log:
                log.seek(before)
                last = "".join(log.readlines()[-10:]).strip() or outcome.stderr.strip()
            raise BismarckError(f"the server in {self.path} did not start:\n{last}", f"more in {self.log}")

    def _ensure_database(self) -> None:
        try:
            connection = psycopg2.connect(host=self._socket(), port=PORT, user="postgres", dbname="postgres")
        except psycopg2.Error as error:
            raise BismarckError(f"the server in {self.path} refuses: {error}", f"more in {self.log}") from error
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute("SELECT FROM pg_database WHERE datname = %s", (DATABASE,))
                if cursor.fetchone() is None:
                    cursor.execute(f"CREATE DATABASE {DATABASE}")
        finally:
            connection.close()

    def _halt(self) -> None:
        """Fast shutdown; immediate when a backend is deep in a computation and does not listen."""
        postmaster = self._postmaster()
        if postmaster is not None and _answers(postmaster[1]):
            for how in (signal.SIGINT, signal.SIGQUIT):
                os.kill(postmaster[0], how)
                if self._gone():
                    break
            else:
                raise BismarckError(f"the server in {self.path} does not stop; it is process {postmaster[0]}")
        self._forget_socket()

    def _gone(self) -> bool:
        """Wait until the server has removed its process file, the last thing it does."""
        deadline = time.monotonic() + STOP_SECONDS
        while (self.pgdata / "postmaster.pid").exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _forget_socket(self) -> None:
        """Remove the socket directory we remember, but nothing in it that is no socket or lock."""
        note = self.path / "socket"
        if not note.exists():
            return
        directory = Path(note.read_text())
        with contextlib.suppress(OSError):
            for entry in directory.glob(".s.PGSQL.*"):
                entry.unlink()
            directory.rmdir()
        note.unlink()


def _answers(directory: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(directory / f".s.PGSQL.{PORT}"))
        except OSError:
            return False
    return True


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


def _checked(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings as given, unless they would move or open the door, or are no settings at all."""
    for name, value in settings.items():
        if name in FIXED_SETTINGS or name == "unix_socket_directories":
            hint = "an embedded server listens on a private socket only"
            raise BismarckError(f"setting `{name}` cannot be changed", hint)
        if not re.fullmatch(r"[A-Za-z_][\w.]*", name, re.ASCII) or "\n" in str(value):
            raise BismarckError(f"`{name}` is no setting of PostgreSQL", "see SHOW ALL for their names")
    return {name: str(value) for name, value in settings.items()}


def _quoted(value: str) -> str:
    """A value as postgresql.conf reads it: backslashes and quotes doubled."""
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def _make_directories(path: Path, account: _Account) -> None:
    """Like mkdir -p, but what root makes is open to the server's user whatever the umask."""
    for step in (*reversed(path.parents), path):
        if not step.exists():
            step.mkdir(exist_ok=True)
            if account.other:
                step.chmod(0o755)


def _mirror(source: Path, target: Path, own: Iterable[Path], skip: str | None = None) -> None:
    """Make `target` hold links to what `source` has, copies of the files `own`, `skip`, and nothing else."""
    copies = {file.name: file for file in own}
    links = {entry.name: entry for entry in source.iterdir() if entry.name != skip}
    for entry in target.iterdir():
        if entry.name not in copies and entry.name not in links and entry.name != skip:
            entry.unlink()
    for name in links.keys() - copies.keys():
        _link(links[name], target / name)
    for name, file in copies.items():
        _copy(file, target / name, 0o755 if file.suffix == ".so" else 0o644)


def _link(source: Path, target: Path) -> None:
    if target.is_symlink() and os.readlink(target) == str(source):
        return
    target.unlink(missing_ok=True)
    target.symlink_to(source)


def _copy(source: Path, target: Path, mode: int) -> None:
    """Copy a file that differs, under another name first: whoever maps the old one keeps it whole."""
    if target.is_file() and not target.is_symlink() and filecmp.cmp(source, target, shallow=False):
        return
    draft = target.with_name(f".{target.name}.new")
    shutil.copyfile(source, draft)
    draft.chmod(mode)
    draft.replace(target)


def _write(path: Path, text: str, mode: int) -> None:
    """Replace a file in one step; never through a link somebody put there."""
    handle, draft = tempfile.mkstemp(dir=path.parent)
    with open(handle, "w") as file:
        os.fchmod(handle, mode)
        file.write(text)
    os.replace(draft, path)
