"""Studies of all phases, in one file, in Optuna's own tools."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import optuna
import pytest
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from autotune.search.verification import confirm
from testbed.examples.feeds import FeedMachine, knee_at, sweep_on
from testbed.fakes import FakeMachine
from testbed.simulators.explorations import FEW, STARTING, additive, exploring
from tests.autotune.memory.simulated_probes import Prober, simulate

FILES = ["tuning.journal", "tuning.db"]
START_TIMEOUT_S = 120
ATTRIBUTES = {
    "tiny: explore": {"configuration", "outcome", "ratio_to_starting"},
    "workers": {"configuration", "outcome", "ratio_to_cached", "utilisation_share"},
    "probe": {"configuration", "outcome", "peak_bytes", "step_s"},
}
"""Names of the studies, with some attributes that their trials have."""
STATES = {
    "tiny: explore": {"Complete", "Pruned"},
    "workers": {"Complete"},
    "probe": {"Complete", "Pruned", "Fail"},
}
"""States of the trials of each study, as the dashboard names them."""


@pytest.fixture(scope="module", params=FILES)
def file(request, tmp_path_factory):
    """Return a file with the studies of a search, a sweep of workers and a probe."""
    directory = tmp_path_factory.mktemp("studies")
    file = directory / request.param
    search = exploring(
        directory / "explore",
        additive({"bf16": 1.5, "full": 0.7}),
        configurations=(STARTING, *FEW[1:60:2]),
        study_file=file,
    )
    search.run()
    confirm(search)
    machine = FeedMachine(knee_at(2), gpus=[{"utilisation_share": 0.9}])
    sweep_on(machine, directory, study_file=file).run()
    (directory / "probe").mkdir()
    Prober(directory / "probe")(FakeMachine(simulate), study_file=file)
    return file


def storage_of(file):
    """Return Optuna's storage of a file."""
    if file.suffix == ".journal":
        return JournalStorage(JournalFileBackend(str(file)))
    return RDBStorage(f"sqlite:///{file}")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_plots_show_the_study(file, name):
    pytest.importorskip("plotly")
    from optuna import visualization

    study = optuna.load_study(study_name=name, storage=storage_of(file))
    plots = [
        visualization.plot_optimization_history,
        visualization.plot_slice,
        visualization.plot_parallel_coordinate,
        visualization.plot_param_importances,
        visualization.plot_timeline,
    ]
    if name != "probe":
        # A size has no intermediate values.
        plots.append(visualization.plot_intermediate_values)
    for plot in plots:
        assert plot(study).data, plot.__name__


@pytest.mark.system
def test_dashboard_serves_the_studies(file):
    pytest.importorskip("optuna_dashboard")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    storage = str(file) if file.suffix == ".journal" else f"sqlite:///{file}"
    run = "from optuna_dashboard._cli import main; main()"
    options = ["--host", "127.0.0.1", "--port", str(port), "--server", "wsgiref"]
    server = subprocess.Popen(
        [sys.executable, "-c", run, storage, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        address = f"http://127.0.0.1:{port}/api/studies"
        summaries = fetch(address, server)["study_summaries"]
        served = {
            summary["study_name"]: fetch(
                f"{address}/{summary['study_id']}?after=0", server
            )["trials"]
            for summary in summaries
        }
    finally:
        server.kill()
        server.wait()
    assert served.keys() == ATTRIBUTES.keys()
    for name, trials in served.items():
        study = optuna.load_study(study_name=name, storage=storage_of(file))
        assert len(trials) == len(study.trials)
        shown = {
            attribute["key"] for trial in trials for attribute in trial["user_attrs"]
        }
        assert ATTRIBUTES[name] <= shown
        assert {trial["state"] for trial in trials} >= STATES[name]


def fetch(address, server):
    """Return the JSON at an address, as soon as the server answers."""
    until_s = time.monotonic() + START_TIMEOUT_S
    while True:
        assert server.poll() is None, "the dashboard has exited"
        try:
            with urllib.request.urlopen(address, timeout=START_TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.URLError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.2)
