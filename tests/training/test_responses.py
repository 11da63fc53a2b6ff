"""The texts of an evaluation in the output folder."""

import logging

from gptlm.training.metrics.responses import _write_predictions


def test_predictions_that_cannot_be_written_are_named_and_training_continues(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("gptlm"), "propagate", True)
    (tmp_path / "predictions").write_text("mine")
    _write_predictions(tmp_path, "predictions/eval-step-1.jsonl", ["a"], ["b"], ["c"])
    said = {record.getMessage() for record in caplog.records}
    assert said == {
        f"cannot write the predictions {tmp_path}/predictions/eval-step-1.jsonl: File exists; training continues "
        "without them"
    }
    assert (tmp_path / "predictions").read_text() == "mine"
