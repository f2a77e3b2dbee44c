"""Reports that fail are counted. What they are for is shown with real workers in `test_failures_workers`."""

import pytest

pytest.importorskip("ray", reason="needs Ray installed")
pytest.importorskip("transfer_queue", reason="needs TransferQueue installed")


class Call:
    """What a router's actor returns, without an actor."""

    def remote(self):
        return {"war/turns": 1.0}


class Router:
    step_metrics = Call()


@pytest.fixture
def consume(monkeypatch):
    """`step_metrics.consume` of a trainer whose router always has the same numbers."""
    from verl_war.integration.verl import step_metrics

    step_metrics._counted.clear()
    monkeypatch.setattr(step_metrics, "_router", Router())
    monkeypatch.setattr(step_metrics.ray, "get", lambda answer, timeout: answer)
    return step_metrics.consume


def test_reports_that_fail_are_counted_in_the_step_and_tried_again(consume, caplog):
    from verl_war.integration.verl.worker_watch import WorkerWatch

    failures = [RuntimeError("the queue does not answer"), KeyError("status")]

    def report(uids):
        if failures:
            raise failures.pop(0)
        return len(uids)

    worker = object()
    watch = WorkerWatch([worker], report, ping_every_s=600.0)
    watch.on_dispatch(worker, ["a", "b"])
    assert [watch._report(worker) for _ in range(3)] == [False, False, True]
    watch.stop()
    assert caplog.text.count("Traceback") == 1 and "the queue does not answer" in caplog.text
    assert "2 prompts of a dead agent loop worker are reported as failed (after 2 tries that failed)" in caplog.text
    assert consume() == {"war/turns": 1.0, "war/worker_reports_failed": 2.0}
    assert consume()["war/worker_reports_failed"] == 0.0, "it is that of one step"
