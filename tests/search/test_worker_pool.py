"""Several processes and one study: each chain once, nothing lost when one is killed."""

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
import torch
from optuna.trial import TrialState

from ksopt.errors import InvalidInputError, KsoptError
from ksopt.measure.roofline import Roofline
from ksopt.patterns.chain import Chain
from ksopt.search import (
    LayerRequest,
    SearchRequest,
    keyboard_interrupts,
    study_store,
    trial_claims,
    trial_records,
    worker_pool,
)
from ksopt.search.device_locks import Presence
from ksopt.search.objectives import Objective
from ksopt.search.options import STUDY
from ksopt.search.pruning import Pruning
from ksopt.search.samplers.chain_sampler import ChainSampler
from ksopt.search.storage import Storage
from ksopt.search.trial_claims import GRACE_S, Claims, alive
from ksopt.search.trial_loop import TrialRun
from ksopt.search.worker_processes import SpareProcess

CHAINS = ["(1,8,4,8)*(4,8,8,1)", "(1,16,8,4)*(4,8,8,1)", "(1,64,8,1)*(1,8,32,1)"]

# The final in the same process: a fresh one needs seconds to begin.
SITE = """
import runpy
from ksopt.search import (objectives, finals)
runpy.run_path(BRIEF)
finals.final = lambda request, device, chains, spare: (
    objectives.Objective(request, device).final(chains, seconds=0.1)
)
"""
COMMAND = "--dims 32x64 --budget 50% --batch 16 --device cpu"


@pytest.fixture
def environment(brief: None, tmp_path: Path) -> dict[str, str]:
    """The environment of processes that measure briefly, and have locks of their own."""
    folder = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])  # of `brief`, before others
    site = tmp_path / "site"
    site.mkdir()
    text = SITE.replace("BRIEF", repr(str(folder / "sitecustomize.py")))
    (site / "sitecustomize.py").write_text(text, encoding="utf-8")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(site), str(folder))),
        "KSOPT_CACHE_DIR": str(tmp_path / "cache"),
    }


def start(environment: dict[str, str], *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ksopt", "search", *COMMAND.split(), *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def study_of(url: str) -> optuna.Study:
    return Storage(url).load(STUDY)


def wait_for(url: str, complete: int, process: subprocess.Popen[str]) -> None:
    """Until so many trials are complete."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        try:
            trials = study_of(url).get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        except InvalidInputError:
            trials = []
        if len(trials) >= complete:
            return
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"{complete} trials took more than a minute")


def children(parent: int) -> list[int]:
    actual = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii")
    return [int(number) for number in actual.split()]


def complete_chains(url: str) -> Counter[str]:
    trials = study_of(url).get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return Counter(trial.user_attrs["chain"] for trial in trials)


def check_shared(url: str, environment: dict[str, str], tmp_path: Path, trials: int = 6) -> None:
    """Two searches with one storage measure each chain once and tell the same of it."""
    pair = [
        start(environment, "--storage", url, "--out", str(tmp_path / name), "--trials", str(trials))
        for name in ("one", "two")
    ]
    for process in pair:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    counts = complete_chains(url)
    assert len(counts) == trials
    assert set(counts.values()) == {1}
    first, second = (
        json.loads((tmp_path / name / "results.json").read_text(encoding="utf-8"))["layers"][0]
        for name in ("one", "two")
    )
    assert len(first["trials"]) == trials
    for trial in [*first["trials"], *second["trials"]]:
        del trial["floor_us"]  # by the roofline that each measured for itself
    assert first["trials"] == second["trials"]
    # Which of them measures how many is the scheduler's choice.
    assert {trial["run"] for trial in first["trials"]} <= {1, 2}
    assert len(first["runs"]) == len(second["runs"]) == 2


@pytest.mark.slow
def test_two_searches_share_a_journal(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "site" / "sitecustomize.py").unlink()  # a fresh process times the finalists
    check_shared(f"journal:{tmp_path / 'shared.log'}", environment, tmp_path)


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_its_trial_redone(
    environment: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    url = f"sqlite:///{out / study_store.FILE}"
    process = start(environment, "--out", str(out), "--workers", "2", "--trials", "14")
    wait_for(url, 2, process)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "was ended by signal 9; another takes its place" in errors
    counts = complete_chains(url)
    assert len(counts) == 14
    assert set(counts.values()) == {1}
    states = Counter(trial.state for trial in study_of(url).trials)
    assert set(states) <= {TrialState.COMPLETE, TrialState.FAIL}
    assert states[TrialState.FAIL] <= 1  # the one that was cut off, if one was


@pytest.mark.slow
def test_workers_end_with_a_killed_parent_and_the_same_command_goes_on(
    environment: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    url = f"sqlite:///{out / study_store.FILE}"
    options = ("--out", str(out), "--workers", "2", "--trials", "12")
    process = start(environment, *options)
    wait_for(url, 3, process)
    workers = children(process.pid)
    assert len(workers) == 2
    process.kill()
    process.communicate()
    for worker in workers:
        until = time.monotonic() + 20
        while Path(f"/proc/{worker}/stat").exists() and time.monotonic() < until:
            if Path(f"/proc/{worker}/stat").read_text(encoding="ascii").split()[2] == "Z":
                break
            time.sleep(0.05)
        else:
            assert not Path(f"/proc/{worker}").exists()
    before = complete_chains(url)
    _, errors = start(environment, *options).communicate(timeout=120)
    after = complete_chains(url)
    assert len(after) == 12, errors
    assert set(after.values()) == {1}
    assert before <= after


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_and_leaves_a_report(
    environment: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ("--out", str(out), "--workers", "2", "--trials", "400")
    process = start(environment, *options)
    wait_for(f"sqlite:///{out / study_store.FILE}", 2, process)
    workers = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    actual = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert actual["stopped"] == "interrupted"
    assert sum(trial["state"] == "complete" for trial in actual["layers"][0]["trials"]) >= 2


def test_a_worker_that_fails_is_reported(tmp_path: Path) -> None:
    request = LayerRequest("32x64", device="cpu", batch=16, out=tmp_path, storage="journal:/no/x")
    task = {"task": "final", "request": request.to_json(), "device": "nowhere", "chains": []}
    with SpareProcess() as spare, pytest.raises(KsoptError, match="the final: "):
        spare.ask(task)


def test_a_spare_process_ends_unasked(capfd: pytest.CaptureFixture[str]) -> None:
    with SpareProcess(early=True) as spare:
        assert spare._worker is not None
        process = spare._worker
        assert not process.has_ended
    assert process.has_ended
    assert "Traceback" not in capfd.readouterr().err


TERMINATED_IN_A_DESTRUCTOR = """
import signal, sys, time
from ksopt.search import worker

class Deaf:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

def task(task, answer):
    Deaf()
    answer({"ran on": True})
    time.sleep(60)

worker.TASKS["nothing"] = task
worker._LAST_WORDS_S = 60
sys.exit(worker.main())
"""


@pytest.mark.slow
def test_a_worker_that_is_terminated_in_a_destructor_ends_and_prints_no_traceback() -> None:
    code, out, err = worker_of(TERMINATED_IN_A_DESTRUCTOR)
    assert code == 130
    assert "ran on" in out  # Python dropped the first interrupt
    assert err == ""


TERMINATED_AS_A_CONNECTION_IS_RETURNED = """
import signal, sys
import sqlalchemy
from ksopt.search import worker

def task(task, answer):
    engine = sqlalchemy.create_engine("sqlite://")
    sqlalchemy.event.listen(engine, "reset", lambda *of: signal.raise_signal(signal.SIGTERM))
    with engine.connect():
        answer({"connected": True})
    answer({"ran on": True})

worker.TASKS["nothing"] = task
sys.exit(worker.main())
"""


@pytest.mark.slow
def test_a_worker_that_is_terminated_as_a_connection_is_returned_prints_no_traceback() -> None:
    code, out, err = worker_of(TERMINATED_AS_A_CONNECTION_IS_RETURNED)
    assert code == 130
    assert json.loads(out) == {"connected": True}
    assert err == ""  # SQLAlchemy logs what comes between, with its traceback


TERMINATED_AT_ITS_END = """
import os, signal, sys
from ksopt.search import worker

ended = False

def profile(frame, event, argument):
    global ended
    if ended and event == "call":  # whatever is called first behind the task's end
        os.kill(os.getpid(), signal.SIGTERM)
    ended = ended or (event == "return" and frame.f_code is worker._done.__code__)

worker.TASKS["nothing"] = lambda task, answer: answer({"done": True})
sys.setprofile(profile)
sys.exit(worker.main())
"""


@pytest.mark.slow
def test_a_worker_that_is_terminated_as_it_ends_prints_no_traceback() -> None:
    code, out, err = worker_of(TERMINATED_AT_ITS_END)
    assert code == 130
    assert json.loads(out) == {"done": True}
    assert err == ""


def worker_of(program: str) -> tuple[int, str, str]:
    """Exit code and output of a worker with the task "nothing"."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write('{"task": "nothing", "device": "cpu"}\n')
    process.stdin.flush()  # and open: a worker ends when its stdin does
    code = process.wait(timeout=100)
    out, err = process.communicate()
    return code, out, err


def test_what_was_drawn_ahead_and_not_begun_is_drawn_again(tmp_path: Path) -> None:
    storage = Storage(f"sqlite:///{tmp_path / 's.db'}")
    with Presence() as presence:
        mine = claims(storage, presence)
        first, second = mine.next(), mine.next()
        assert first is not None
        assert second is not None
        mine.give_back(second)
        roofline = Roofline("cpu", "float32", 1e9, 1e9, 1, 1, "made up")
        assert trial_records.records(mine.study, roofline, 16) == ()  # it is no trial of the report
        again = mine.next()
        assert again is not None
        assert again.chain == second.chain


def test_what_others_took_over_before_it_was_begun_is_left_to_them(tmp_path: Path) -> None:
    storage = Storage(f"sqlite:///{tmp_path / 's.db'}")
    roofline = Roofline("cpu", "float32", 1e9, 1e9, 1, 1, "made up")
    request = LayerRequest("32x64", device="cpu", batch=16)
    with Presence() as presence:
        mine = claims(storage, presence)
        objective = Objective(request, torch.device("cpu"))
        pruning = Pruning(mine.study, [], request)
        trial_run = TrialRun(
            mine, objective, torch.device("cpu"), roofline, request, pruning, model=None
        )
        taken = [mine.next(), mine.next()]
        for claim in taken:
            assert claim is not None
            trial_run._drawn.append(claim)
            # This process stood still for a minute, and another machine gave its trials up.
            mine.study.tell(claim.trial.number, state=TrialState.FAIL)
        assert trial_run.step() == 0
        trial_run.end()
        states = [trial.state for trial in mine.study.get_trials()]
        assert states == [TrialState.FAIL] * 2
        assert trial_records.records(mine.study, roofline, 16) == ()


# Claims, as processes of several machines make them.


def claims(storage: Storage, presence: Presence, **options: object) -> Claims:
    actual = [Chain.parse(text) for text in CHAINS]
    arguments = {"priors": [], "limit": 3, "run": 1, **options}
    return Claims(
        storage,
        storage.create(STUDY, ("minimize", "minimize")),
        ChainSampler(actual, "exhaustive", seed=0),
        presence=presence,
        **arguments,  # type: ignore[arg-type]
    )


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    return Storage(f"journal:{tmp_path / 'claims.log'}")


def test_each_chain_is_claimed_once(storage: Storage) -> None:
    with Presence() as one, Presence() as two:
        here, there = claims(storage, one), claims(storage, two)
        actual = [here.next(), there.next(), here.next()]
        assert sorted(str(claim.chain) for claim in actual if claim is not None) == sorted(CHAINS)
        assert here.next() is None
        assert there.next() is None
        assert here.others()


def test_what_a_process_of_this_machine_left_is_taken_over_at_once(storage: Storage) -> None:
    killed = Presence()
    left = claims(storage, killed, limit=1).next()
    assert left is not None
    with Presence() as alive:
        rest = claims(storage, alive, limit=1)
        assert rest.next() is None  # it is at work
        killed._lock.release()  # as the system does when a process ends
        redone = rest.next()
        assert redone is not None
        assert redone.chain == left.chain
        assert not rest.others()


def test_another_machines_process_gets_time(storage: Storage) -> None:
    now = [0.0]
    with Presence() as far, Presence() as near:
        far.host = "another-machine"
        left = claims(storage, far, limit=1).next()
        assert left is not None
        rest = claims(storage, near, limit=1, clock=lambda: now[0])
        assert rest.next() is None
        now[0] = GRACE_S - 1
        assert rest.next() is None
        left.trial.set_user_attr("heartbeat", 1)
        now[0] = GRACE_S + 1
        assert rest.next() is None  # it has shown life
        now[0] = 3 * GRACE_S
        redone = rest.next()
        assert redone is not None
        assert redone.chain == left.chain


def test_a_chain_that_ends_its_process_again_and_again_is_abandoned(storage: Storage) -> None:
    for _ in range(3):
        killed = Presence()
        claim = claims(storage, killed, limit=1).next()
        assert claim is not None
        assert str(claim.chain) == CHAINS[0]
        claim.trial.set_user_attr("facts", {"device": "cpu"})  # it was being measured
        killed._lock.release()
    with Presence() as alive:
        assert claims(storage, alive, limit=1).next() is None
        following = claims(storage, alive, limit=2).next()
        assert following is not None
        assert str(following.chain) == CHAINS[1]


def test_a_chain_that_was_only_drawn_is_not_to_blame(storage: Storage) -> None:
    for _ in range(4):
        killed = Presence()
        claim = claims(storage, killed, limit=1).next()
        assert claim is not None
        assert str(claim.chain) == CHAINS[0]
        killed._lock.release()


@pytest.mark.slow
def test_a_device_is_one_processs_at_a_time(environment: dict[str, str], tmp_path: Path) -> None:
    script = (
        "import sys, time, torch\n"
        "from ksopt.search import device_locks\n"
        "with device_locks.device(torch.device('cpu')):\n"
        "    print(time.monotonic(), flush=True); time.sleep(0.3); print(time.monotonic())\n"
    )
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**environment, "PYTHONPATH": ""},  # which measures nothing
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    spans = sorted([float(x) for x in p.communicate(timeout=60)[0].split()] for p in pair)
    assert spans[0][1] <= spans[1][0]


def test_workers_take_turns_on_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"cuda:0": "H200", "cuda:1": "old", "cuda:2": "H200", "cuda:3": "H200"}
    monkeypatch.setattr(worker_pool.devices, "available", lambda: ["cpu", *names])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: names[str(place)])
    assert worker_pool.workplaces(torch.device("cuda:2"), 4) == [
        "cuda:2",
        "cuda:3",
        "cuda:0",
        "cuda:2",
    ]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("journal:", "or journal:FILE"),
        ("sqlite://", "or journal:FILE"),
        ("oracle://x", "does not know how to share a oracle server"),
        ("journal:/no/such/folder/x", "cannot be used"),
        ("postgresql+psycopg://ann:secret@127.0.0.1:1/x", "ann:[*]{3}@"),
    ],
)
def test_a_storage_that_cannot_be_used(url: str, words: str) -> None:
    if "psycopg" in url:
        pytest.importorskip("psycopg")
    with pytest.raises(InvalidInputError, match=words) as refused:
        Storage(url).create(STUDY)
    assert "secret" not in str(refused.value)


def test_a_password_is_in_no_report() -> None:
    url = "postgresql://ann:secret@host/x"
    command = SearchRequest("32x64", storage=url).command
    assert "secret" not in command
    assert "postgresql://ann:***@host/x" in command


# PostgreSQL, for real, where it is installed.


def _postgresql() -> Path | None:
    actual = shutil.which("initdb")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    file = Path(actual).resolve() if actual else folders[-1] if folders else None
    return None if file is None else file.parent


@pytest.fixture
def postgresql() -> Iterator[str]:
    """URL of a database of a server that this test starts and ends."""
    programs = _postgresql()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    pytest.importorskip("psycopg", reason="psycopg is not installed (pip install psycopg[binary])")
    user: dict[str, object] = {}
    if os.getuid() == 0:  # PostgreSQL does not run as root
        try:
            account = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        user = {"user": account.pw_uid, "group": account.pw_gid}
    # Not under tmp_path, which pytest closes to other users.
    with tempfile.TemporaryDirectory(prefix="ksopt-postgresql-") as name:
        folder = Path(name)
        if user:
            os.chown(folder, account.pw_uid, account.pw_gid)
        yield from _server(programs, folder, user)


def _server(programs: Path, folder: Path, user: dict[str, object]) -> Iterator[str]:
    def call(name: str, *options: str) -> None:
        done = subprocess.run(
            [programs / name, *options],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            **user,  # type: ignore[call-overload]
        )
        assert done.returncode == 0, done.stdout

    data = folder / "data"
    call("initdb", "-D", str(data), "-U", "ksopt", "--auth=trust", "--no-sync")
    options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
    call("pg_ctl", "-D", str(data), "-w", "-l", str(folder / "log"), "-o", options, "start")
    try:
        yield f"postgresql+psycopg://ksopt@/postgres?host={folder}"
    finally:
        call("pg_ctl", "-D", str(data), "-m", "immediate", "stop")


@pytest.mark.slow
def test_postgresql(postgresql: str, environment: dict[str, str], tmp_path: Path) -> None:
    """Shared by two searches; a third is killed in the middle and goes on."""
    check_shared(postgresql, environment, tmp_path, trials=4)
    check_killed(postgresql, environment, tmp_path)


def check_killed(url: str, environment: dict[str, str], tmp_path: Path) -> None:
    options = ("--storage", url, "--out", str(tmp_path / "one"), "--trials", "15")
    process = start(environment, *options)
    wait_for(url, 6, process)
    process.kill()
    process.communicate()
    before = complete_chains(url)
    _, errors = start(environment, *options).communicate(timeout=120)
    after = complete_chains(url)
    assert len(after) == 15, errors
    assert set(after.values()) == {1}
    assert before <= after
    assert not study_of(url).get_trials(states=(TrialState.RUNNING,))


# MySQL, or MariaDB, which speaks alike, for real, where it is installed.


@pytest.fixture
def mysql() -> Iterator[str]:
    """URL of a database of a server that this test starts and ends."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    server = shutil.which("mariadbd", path=path) or shutil.which("mysqld", path=path)
    if server is None:
        pytest.skip(
            "neither MariaDB nor MySQL is installed (Debian: apt-get install mariadb-server)"
        )
    driver = pytest.importorskip("pymysql", reason="PyMySQL is not installed (pip install pymysql)")
    with tempfile.TemporaryDirectory(prefix="ksopt-mysql-") as name:
        data, socket = Path(name) / "data", Path(name) / "socket"
        user = ["--user=root"] if os.getuid() == 0 else []  # it runs as root if it is told to
        install = shutil.which("mariadb-install-db", path=path)
        if install is not None:
            options = [f"--datadir={data}", "--auth-root-authentication-method=normal"]
            command = [install, "--no-defaults", *options, "--skip-test-db", *user]
        else:
            command = [server, "--no-defaults", "--initialize-insecure", f"--datadir={data}", *user]
        created = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert created.returncode == 0, created.stdout + created.stderr
        options = [f"--datadir={data}", f"--socket={socket}", f"--pid-file={name}/pid"]
        with (Path(name) / "log").open("w") as log:
            process = subprocess.Popen(
                [server, "--no-defaults", *options, "--skip-networking", *user],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            until = time.monotonic() + 60
            while True:
                try:
                    connection = driver.connect(unix_socket=str(socket), user="root")
                    break
                except driver.MySQLError:
                    assert process.poll() is None, (Path(name) / "log").read_text()
                    assert time.monotonic() < until, (Path(name) / "log").read_text()
                    time.sleep(0.1)
            with connection, connection.cursor() as cursor:
                cursor.execute("CREATE DATABASE ksopt")
            yield f"mysql+pymysql://root@localhost/ksopt?unix_socket={socket}"
        finally:
            process.terminate()
            process.wait()


@pytest.mark.slow
def test_mysql(mysql: str, environment: dict[str, str], tmp_path: Path) -> None:
    """Shared by two searches; a third is killed in the middle and goes on."""
    check_shared(mysql, environment, tmp_path, trials=4)
    check_killed(mysql, environment, tmp_path)


def test_a_ctrl_c_that_was_raised_where_nobody_hears_it_ends_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a destructor: Python drops it there, and goes on."""

    class Deaf:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    before = signal.getsignal(signal.SIGINT)
    with keyboard_interrupts.remembered() as interrupted:
        assert not interrupted()
        Deaf()
        assert interrupted()
    assert not printed
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):  # as ever
        signal.raise_signal(signal.SIGINT)


def test_other_faults_of_a_destructor_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty:
        def __del__(self) -> None:
            raise ValueError

    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    with keyboard_interrupts.remembered():
        Faulty()
    assert len(printed) == 1


def test_all_that_a_process_holds_has_marks_of_life(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was drawn ahead, too, and of other studies: they wait while one is measured."""
    monkeypatch.setattr(trial_claims, "BEAT_S", 0.02)
    with Presence() as presence:
        drawing = claims(storage, presence)
        held = [claim for claim in (drawing.next(), drawing.next()) if claim is not None]
        assert len(held) == 2

        def marks() -> list[object]:
            trials = drawing.study.get_trials(deepcopy=False)
            return [trial.user_attrs.get("heartbeat") for trial in trials]

        assert marks() == [None, None]
        until = time.monotonic() + 30
        with alive(lambda: held):
            while None in marks() and time.monotonic() < until:
                time.sleep(0.02)
        first = marks()
        assert None not in first
        held[0].trial.set_user_attr("outcome", {"reason": "it failed"})
        drawing.study.tell(held[0].trial, state=TrialState.FAIL)
        with alive(lambda: held):  # one has ended meanwhile
            time.sleep(0.1)
        assert marks()[0] == first[0]
        assert marks()[1] is not None
