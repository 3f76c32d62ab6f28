"""A config.json that is not a model's."""

import json

import pytest

from roll_lite.checks import UserError
from roll_lite.models.config import read_config


def test_the_folder_of_a_run_is_no_model_and_says_where_its_model_is(tmp_path):
    def put(name, **content):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))

    def told():
        with pytest.raises(UserError) as error:
            read_config(tmp_path)
        return str(error.value).replace(str(tmp_path), "runs/a")

    put("config.json", model="models/tiny", starts=[])
    assert told() == "runs/a is a run folder; it has written no model yet"
    put("checkpoints/step-00000004/manifest.json", score=0.5)
    export = "`roll-lite export runs/a/checkpoints/step-0000000{} OUT`"
    assert told().endswith(f"; {export.format(4)} makes one of its newest checkpoint")
    put("checkpoints/step-00000002/manifest.json", score=0.75)
    put("model/config.json", model_type="llama")
    assert told() == (
        "runs/a is a run folder; its model is runs/a/model; its best checkpoint is "
        f"runs/a/checkpoints/step-00000002, of which {export.format(2)} makes a model"
    )
    put("checkpoints/step-00000004/manifest.json", score=None)  # the run was not evaluated then
    put("checkpoints/step-00000002/manifest.json", score=None)
    assert told() == "runs/a is a run folder; its model is runs/a/model"
