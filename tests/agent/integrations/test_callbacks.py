"""Callbacks in the real frameworks, and loggers with their real packages, offline."""

import json
import logging
import math
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from dynamiccl.agent.daemon.request import Request
from dynamiccl.agent.integrations import follow as following
from dynamiccl.agent.integrations.current import Values, current_results
from dynamiccl.agent.integrations.follow import follow
from dynamiccl.agent.integrations.loggers import LOGGERS, check_logger
from dynamiccl.agent.report.runs import state
from synthetic_trace import write_run


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """This process takes part in a run that has kept a table; returns the folder of the results."""
    out, run = tmp_path / "out", tmp_path / "run"
    summary, _ = write_run(out / "trace", search=4, final=6)
    (out / "summary.json").write_text(json.dumps(summary | {"kept": True}))
    run.mkdir()
    Request(out=out).write(run)
    monkeypatch.setenv("DYNAMICCL_RUN", str(run))
    return out


def is_right(values):
    gain = values["dynamiccl/gain"]
    return values["dynamiccl/tuned"] == 1 and values["dynamiccl/step_ms"] > 0 and 0 < gain < 1


def test_values_are_those_of_the_run_every_so_many_steps(tuned):
    values = Values(every=5)
    assert values.results == tuned and is_right(values.at(5))
    assert values.at(9) == {} and is_right(values.at(11))
    assert is_right(values.at(1)), "a training that begins anew"
    with pytest.raises(ValueError, match="at least 1 step"):
        Values(every=0)


def test_files_that_have_not_changed_are_not_read_again(tuned, monkeypatch):
    """Before: rank 0's own thread parsed up to 256 KiB of JSON each time."""
    from dynamiccl.agent.integrations import current

    reads = []
    monkeypatch.setattr(current, "state", lambda *run: reads.append(run) or state(*run))
    values = Values(every=1)
    first = values.at(1)
    assert values.at(2) == first and len(reads) == 1
    path = tuned / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kept": False}))
    os.utime(path, ns=(1, 1))
    assert values.at(3)["dynamiccl/tuned"] == 0 and len(reads) == 2


def test_without_a_tuner_nothing_is_logged(monkeypatch):
    monkeypatch.delenv("DYNAMICCL_RUN", raising=False)
    assert current_results() is None
    assert Values(every=1).at(1) == {}


def hugging_face(tmp_path, monkeypatch, **arguments):
    """A trainer, what its reporters are told, and the steps at which it gathers the loss from all ranks."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    told, gathered = [], []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **more):
            told.append(dict(logs))

    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8)
    arguments = transformers.TrainingArguments(
        str(tmp_path / "hf"),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        per_device_train_batch_size=2,
        **arguments,
    )
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
    model = transformers.GPT2LMHeadModel(config)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data, callbacks=[Reporter()]
    )
    gather = transformers.trainer.nested_gather

    def nested_gather(*given, **more):
        gathered.append(trainer.state.global_step)
        return gather(*given, **more)

    monkeypatch.setattr(transformers.trainer, "nested_gather", nested_gather)
    return trainer, told, gathered


def test_the_trainer_of_hugging_face_logs_them_with_its_loss(tuned, tmp_path, monkeypatch):
    """Before: rank 0 skipped the log of the loss, with its all-gather, at steps where our figures were due."""
    trainer, told, gathered = hugging_face(tmp_path, monkeypatch, max_steps=6, logging_steps=2)
    from dynamiccl.agent.integrations.huggingface import watch

    watch(trainer, every=2)
    watch(trainer, every=4)
    trainer.train()
    assert gathered == [2, 4, 6]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4, 6]
    for entries in (logged, [entry for entry in told if "loss" in entry]):
        assert ["dynamiccl/step_ms" in entry for entry in entries] == [False, True, False]
        assert is_right(entries[1])


def test_results_of_hugging_face_stay_as_they_are(tuned, tmp_path, monkeypatch):
    """A search of hyperparameters sums what an evaluation returns."""
    trainer, _, _ = hugging_face(tmp_path, monkeypatch, max_steps=2, logging_steps=1)
    from dynamiccl.agent.integrations.huggingface import watch

    watch(trainer, every=1)
    found = trainer.train().metrics | trainer.evaluate()
    assert "eval_loss" in found and not any(name.startswith("dynamiccl/") for name in found)


def test_the_trainer_of_lightning_logs_them(tuned, tmp_path):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from dynamiccl.agent.integrations.lightning import DynamicclCallback
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path / "logs")
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=4,
        logger=logger,
        callbacks=[DynamicclCallback(every=2)],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    with pytest.MonkeyPatch.context() as patch:
        logged = []
        patch.setattr(logger, "log_metrics", lambda values, step=None: logged.append((step, values)))
        trainer.fit(BoringModel())
    ours = [(step, values) for step, values in logged if "dynamiccl/step_ms" in values]
    assert [step for step, _ in ours] == [2, 4] and all(is_right(values) for _, values in ours)


def accelerated():
    """An accelerator with one tracker, and what is logged to it: pairs (step, values)."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.tracking import GeneralTracker

    logged = []

    class Kept(GeneralTracker):
        name, requires_logging_directory, tracker = "kept", False, None

        def log(self, values, step=None, **more):
            logged.append((step, values))

    accelerator = accelerate.Accelerator(cpu=True, log_with=[Kept()])
    accelerator.init_trackers("project")
    return accelerator, logged


def take_steps(number):
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(number):
        optimizer.step()


def test_accelerate_logs_them(tuned):
    accelerator, logged = accelerated()
    from dynamiccl.agent.integrations.accelerate import watch

    watch(accelerator, every=2)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    assert [step for step, _ in logged] == [2, 4] and all(is_right(values) for _, values in logged)


def test_accelerate_logs_once_and_until_the_training_ends(tuned):
    """Before: twice after a second call, and into trackers that had ended."""
    accelerator, logged = accelerated()
    from dynamiccl.agent.integrations.accelerate import watch

    watch(accelerator, every=2)
    watch(accelerator, every=3)
    take_steps(4)
    accelerator.end_training()
    take_steps(4)
    assert [step for step, _ in logged] == [3]


def test_accelerate_leaves_the_step_of_wandb_to_the_job(tuned):
    """Before: W&B dropped what the job logged at steps below the one that we had logged last."""
    accelerator, _ = accelerated()
    from dynamiccl.agent.integrations.accelerate import watch

    logged = []
    wandb = SimpleNamespace(
        name="wandb", log=lambda values, **how: logged.append((values, how)), finish=lambda: None
    )
    accelerator.trackers = [wandb]
    watch(accelerator, every=2)
    take_steps(4)
    accelerator.end_training()
    assert [how for _, how in logged] == [{"commit": False}] * 2 and is_right(logged[0][0])


@pytest.fixture
def said(monkeypatch, caplog):
    """What the logger of dynamiccl says. A tuner that ran in this process keeps it from the root's handlers."""
    monkeypatch.setattr(logging.getLogger("dynamiccl"), "propagate", True)
    return caplog


def test_a_tracker_that_fails_ends_no_job(tuned, said):
    """Before: its error came out of ``optimizer.step()``."""
    accelerator, _ = accelerated()
    from dynamiccl.agent.integrations.accelerate import watch

    calls = []

    def fails(values, step):
        calls.append(step)
        raise ConnectionError("no server")

    accelerator.trackers = [SimpleNamespace(name="mlflow", log=fails, finish=lambda: None)]
    watch(accelerator, every=1)
    take_steps(3)
    accelerator.end_training()
    assert calls == [1]
    assert said.messages == ["the tuner's figures are no longer logged: ConnectionError: no server"]


def test_a_damaged_run_folder_ends_no_job(tuned, said):
    (tuned.parent / "run" / "request.json").write_text("{")
    values = Values()
    assert values.at(10) == {} and "is damaged" in said.text


class Kept:
    """A logger that keeps what it is told."""

    def __init__(self):
        self.steps, self.is_closed = [], False

    def log(self, step, values):
        self.steps.append(step)

    def close(self):
        self.is_closed = True


def states(monkeypatch, *scripted):
    """Let a run stand in these states one after another: (its state, last step, number of the last window)."""
    found = iter({"state": state, "step": step, "window": window} for state, step, window in scripted)
    monkeypatch.setattr(following, "state", lambda *run: next(found))


def test_a_job_that_is_started_anew_is_logged_from_its_first_window(tmp_path, monkeypatch):
    """Before: nothing until it had come as far as the job before it."""
    alive = [("tuning", step, step // 10) for step in (10, 20, 20, 10, 30)]
    states(monkeypatch, *alive, ("ended", 40, 4))
    follow(tmp_path, kept := Kept(), every_s=0, patience_s=60)
    assert kept.steps == [10, 20, 10, 30, 40]


def test_a_node_without_rank_0_makes_no_run_in_the_logger(tmp_path, monkeypatch):
    """Before: a job of 32 nodes made 31 empty ones."""
    made = []
    monkeypatch.setitem(LOGGERS, "wandb", (lambda *_: made.append(Kept()) or made[-1], "wandb"))
    monkeypatch.setattr(following, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: None))
    monkeypatch.setattr(sys, "argv", ["follow", str(tmp_path), "wandb"])
    monkeypatch.setattr(os, "nice", lambda _: None)
    states(monkeypatch, ("waiting", None, None), ("waiting", 0, None), ("ended", 0, None))
    following.main()
    assert made == []
    states(monkeypatch, ("waiting", None, None), ("tuning", 10, 1), ("ended", 20, 1))
    following.main()
    assert [(one.steps, one.is_closed) for one in made] == [([10, 20], True)]


def test_a_run_in_wandb_is_not_the_jobs_own(tmp_path, monkeypatch):
    """Before: with the job's WANDB_RUN_ID in its environment the follower wrote into the job's run."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    for name, value in {"RUN_ID": "theirs", "RESUME": "must", "SWEEP_ID": "s", "MODE": "offline"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    seen, logged = {}, []
    run = SimpleNamespace(
        log=lambda *given, **more: logged.append((given, more)), define_metric=lambda *_, **__: 0
    )

    def init(**given):
        seen.update(given, environment=dict(os.environ))
        return run

    monkeypatch.setattr(wandb, "init", init)
    logger = LOGGERS["wandb"][0](tmp_path, "job")
    assert seen["id"] != "theirs" and seen["resume"] == "never"
    assert {"WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID"}.isdisjoint(seen["environment"])
    assert seen["environment"]["WANDB_MODE"] == "offline"
    for step in (20, 10):  # W&B drops what comes with a step below its newest
        logger.log(step, {"dynamiccl/gain": 0.1})
    assert logged[1] == (({"dynamiccl/step": 10, "dynamiccl/gain": 0.1},), {})


@pytest.mark.parametrize("named", ["", "by-name", "new"])
def test_a_run_in_mlflow_is_in_the_experiment_that_is_named(tmp_path, monkeypatch, named):
    """Before: in the newest one, whatever MLFLOW_EXPERIMENT_NAME said."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", named)
    client = mlflow.MlflowClient()
    client.create_experiment("by-name")
    client.create_experiment("newest")
    logger = LOGGERS["mlflow"][0](tmp_path, "job")
    experiment = client.get_experiment(client.get_run(logger.run_id).info.experiment_id)
    assert experiment.name == (named or "Default")
    logger.close()


@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_takes_the_figures_of_a_run(name, tuned, tmp_path, monkeypatch):
    pytest.importorskip(LOGGERS[name][1], reason=f"{name} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    make, _ = LOGGERS[name]
    logger = make(tuned, "torchrun train.py")
    follow(tuned, logger, every_s=0.01, patience_s=0.01)
    logger.close()
    step_ms = READ[name](tuned, tmp_path)
    assert math.isclose(step_ms, Values(every=1).at(1)["dynamiccl/step_ms"], rel_tol=1e-6)


def _tensorboard(out, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return events.Scalars("dynamiccl/step_ms")[-1].value


def _wandb(out, tmp_path):
    """A history item of the offline file: field 16 of the record holds the value as JSON, after its length."""
    import wandb

    wandb.teardown()  # as at the end of a process: its service then has written all
    (file,) = (out / "wandb").glob("offline-run-*/run-*.wandb")
    found = re.search(rb"dynamiccl/step_ms\x82\x01(.)", file.read_bytes(), re.DOTALL)
    return float(found.string[found.end() : found.end() + found[1][0]])


def _mlflow(out, tmp_path):
    (file,) = (tmp_path / "mlruns").glob("*/*/metrics/dynamiccl/step_ms")
    return float(file.read_text().split()[1])


READ = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}


def test_an_unknown_logger_is_refused_by_name():
    with pytest.raises(ValueError, match="one of tensorboard, wandb, mlflow, not 'tensorbord'"):
        check_logger("tensorbord")


def test_a_logger_without_its_package_is_refused_with_the_cure(monkeypatch):
    monkeypatch.setitem(LOGGERS, "wandb", (LOGGERS["wandb"][0], "no_such_package"))
    with pytest.raises(ValueError, match="pip install no_such_package"):
        check_logger("wandb")
