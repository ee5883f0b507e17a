"""The study of a search in Optuna's own tools."""

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
from testbed.simulators.explorations import FEW, STARTING, additive, exploring

FILES = ["tuning.journal", "tuning.db"]
NAME = "tiny: explore"
START_TIMEOUT_S = 120


def explored(directory, file):
    """Write the study of a search and its verification."""
    search = exploring(
        directory / "trials",
        additive({"bf16": 1.5, "full": 0.7}),
        configurations=(STARTING, *FEW[1:60:2]),
        study_file=file,
    )
    search.run()
    confirm(search)
    return search.study.study


@pytest.mark.parametrize("file_name", FILES)
def test_plots_show_the_study(tmp_path, file_name):
    pytest.importorskip("plotly")
    from optuna import visualization

    file = tmp_path / file_name
    search_study = explored(tmp_path, file)
    storage = (
        JournalStorage(JournalFileBackend(str(file)))
        if file.suffix == ".journal"
        else RDBStorage(f"sqlite:///{file}")
    )
    study = optuna.load_study(study_name=NAME, storage=storage)
    assert len(study.trials) == len(search_study.trials)
    plots = [
        visualization.plot_optimization_history,
        visualization.plot_slice,
        visualization.plot_parallel_coordinate,
        visualization.plot_param_importances,
        visualization.plot_intermediate_values,
        visualization.plot_timeline,
    ]
    for plot in plots:
        assert plot(study).data, plot.__name__


@pytest.mark.system
@pytest.mark.parametrize("file_name", FILES)
def test_dashboard_serves_the_study(tmp_path, file_name):
    pytest.importorskip("optuna_dashboard")
    file = tmp_path / file_name
    study = explored(tmp_path, file)
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
        (summary,) = fetch(address, server)["study_summaries"]
        assert summary["study_name"] == NAME
        served = fetch(f"{address}/{summary['study_id']}?after=0", server)
    finally:
        server.kill()
        server.wait()
    assert len(served["trials"]) == len(study.trials)
    shown = {
        attribute["key"]
        for trial in served["trials"]
        for attribute in trial["user_attrs"]
    }
    assert {"configuration", "outcome", "ratio_to_starting"} <= shown
    states = {trial["state"] for trial in served["trials"]}
    assert {"Complete", "Pruned"} <= states


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
