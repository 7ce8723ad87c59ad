"""``overhead.py``: what being watched costs a job."""

import sys

import pytest
from overhead import main, measure

CLUSTER = "dgx-h100-2x8"


def test_overhead_is_the_ratio_of_the_jobs_own_clocks():
    """A job that takes 10 ms a step, and 11 with the plugin's environment."""
    program = (
        "import json, os, sys; ms = 11 if 'DYNAMICCL_RUN' in os.environ else 10;"
        "open(sys.argv[1], 'w').writelines(json.dumps({'step': i, 'step_ms': ms}) + chr(10) for i in range(8))"
    )
    said = []
    result = measure(3, lambda log: [sys.executable, "-c", program, str(log)], {}, said.append)
    assert abs(result[0] - 1.1) < 1e-9 and len(said) == 3
    for words in ("no luck", "error: no luck\\n===="):
        with pytest.raises(RuntimeError, match="no luck"):
            measure(3, lambda log, words=words: [sys.executable, "-c", f"raise SystemExit('{words}')"], {})


def test_overhead_without_a_figure_is_not_all_well():
    """Before: it printed NaN and "all well".

    Seen at 679c0ae, ``gpu-check`` calls an overhead of NaN well: "overhead +nan % [+nan, +nan]", and ``ok``.
    """
    program = "import sys; open(sys.argv[1], 'w').write('{\"step_ms\": 1}\\n' * 5)"
    with pytest.raises(RuntimeError, match="no step time"):
        measure(3, lambda log: [sys.executable, "-c", program, str(log)], {})


@pytest.mark.slow
def test_overhead_of_our_own_job(capsys):
    main(["--pairs", "3", "--steps", "10", "--cluster", CLUSTER])
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("overhead ") and said[-1].endswith(" of a step, 3 pairs")
