"""Documentation that cannot rot: docstrings on everything public, pages whose files and links exist."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from fractions import Fraction

import gymnasium
import numpy as np
import pytest
from cli_process import run
from dynamiccl.agent.integrations.follow import KEYS
from dynamiccl.agent.report.runs import METRICS
from dynamiccl.envs.bench.strata import SUITES, filed
from dynamiccl.envs.search.observation import CONTEXT, FIGURES, N_OBSERVATION, NEVER_OPEN
from dynamiccl.traces.fingerprint import FEATURES
from dynamiccl.traces.spaces import N_CONFIGS, decision_of
from paths import ROOT
from synthetic_trace import write_run

FOLDERS = ("agent", "envs", "traces", "zero_workload")
PYTHON = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
README = ROOT / "README.md"
READMES = sorted(p for folder in (".", *FOLDERS, "envs/nccl", "docs") for p in (ROOT / folder).glob("*.md"))


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def undocumented(tree):
    """Public classes, functions and methods without a docstring (a Protocol's ``...`` needs none), and the module."""
    missing = [] if ast.get_docstring(tree) or not tree.body else ["the module"]

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if child.name.startswith("_"):
                    continue
                overload = any("overload" in ast.dump(d) for d in child.decorator_list)
                setter = any(
                    isinstance(d, ast.Attribute) and d.attr == "setter" for d in child.decorator_list
                )
                stub = (
                    isinstance(child.body[-1], ast.Expr) and getattr(child.body[-1].value, "value", 0) is ...
                )
                if not ast.get_docstring(child) and not (overload or setter or stub):
                    missing.append(prefix + child.name)
                if isinstance(child, ast.ClassDef):
                    visit(child, prefix + child.name + ".")

    visit(tree, "")
    return missing


def test_everything_public_has_a_docstring():
    found = {name_of(path): undocumented(ast.parse(path.read_text(encoding="utf-8"))) for path in PYTHON}
    assert {name: missing for name, missing in found.items() if missing} == {}


def test_the_check_sees_what_is_missing():
    source = '"""M."""\nclass A:\n    """A."""\n    def f(self): return 1\n    def _g(self): return 2\n'
    source += "def h(): return 3\n"
    assert undocumented(ast.parse(source)) == ["A.f", "h"]
    assert undocumented(ast.parse("x = 1")) == ["the module"]


def test_the_first_page_is_short_and_each_folder_has_one():
    assert README.stat().st_size <= 8 * 1024
    for folder in (*FOLDERS, "envs/nccl"):
        assert (ROOT / folder / "README.md").exists() and f"({folder}/README.md)" in README.read_text("utf-8")


@pytest.mark.parametrize("path", [p for p in READMES if p.parent != ROOT], ids=name_of)
def test_files_that_a_folders_page_names_exist(path):
    """Names in backticks that end as our files do; ``<...>`` stands for something."""
    named = set(re.findall(r"`([\w./<>-]+\.(?:py|c|h|md|toml))`", path.read_text(encoding="utf-8")))
    missing = [n for n in named if "<" not in n and not ((path.parent / n).exists() or (ROOT / n).exists())]
    assert sorted(missing) == []


@pytest.mark.parametrize("path", READMES, ids=name_of)
def test_links_inside_the_repository_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", text)
    assert [t for t in targets if not (path.parent / t).exists()] == []


def slugs(page):
    """The anchors that GitHub gives to the headings of a page."""
    lines = re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8")).splitlines()
    heads = [re.sub(r"\]\(.*?\)", "", line.lstrip("#").strip()) for line in lines if re.match("#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", READMES, ids=name_of)
def test_anchors_of_links_are_headings(path):
    """Before: on GitHub a page led to `operating.md#variables`, a page of two lines. `make docs` checks the links of
    the site."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"\]\((?!https?:)([^)#\s]*\.md|)#([^)\s]+)\)", text)
    pages = {target: path.parent / target if target else path for target, _ in found}
    assert [f"{target}#{anchor}" for target, anchor in found if anchor not in slugs(pages[target])] == []


def test_the_site_suppresses_no_dead_link():
    """Before: 21 links of the site led nowhere, because the warning about them was off."""
    settings = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    assert "xref_missing" not in settings and "-W" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_tour_of_the_job_names_what_is_there():
    """Every name in backticks that stands outside of links is something that the folder's modules define."""
    folder = ROOT / "zero_workload"
    tour = (folder / "README.md").read_text(encoding="utf-8").partition("## A guided tour")[2]
    nodes = [
        node
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]
    defined = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    named = set(re.findall(r"(?<!\[)`(\w+)`", tour))
    assert len(named) > 10 and named <= defined


DEPLOYMENT = ROOT / "OPERATING.md"
#: The rows of the tables of faults, with the tests that show them.
FAULTS = tomllib.loads((ROOT / "tests" / "data" / "promises.toml").read_text("utf-8"))["fault"]


def rows(page):
    """The cells of the page's tables, row by row, without heads and rules."""
    lines = [
        line.strip("|").split("|") for line in page.read_text("utf-8").splitlines() if line.startswith("| ")
    ]
    return [[cell.strip() for cell in line] for line in lines]


def test_every_test_of_a_fault_exists():
    named = [test.split("::") for fault in FAULTS.values() for test in fault.get("tests", ())]
    missing = [test for test in named if f"def {test[1]}(" not in (ROOT / test[0]).read_text("utf-8")]
    assert len(named) > 60 and not missing


@pytest.mark.parametrize("path", READMES, ids=name_of)
def test_every_command_and_option_that_a_page_names_exists(path):
    """Seen: `bench --trace`, of a command that had gone. But for the notebook and what was changed."""
    if path.name.startswith(("LOG", "CHANGELOG")):
        return
    options = json.loads((ROOT / "tests" / "data" / "command_line.json").read_text())
    text = path.read_text(encoding="utf-8")
    said = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^(?:\S+\$ )?(dynamiccl .*)$", text, re.M)
    for one in said:
        words = re.split(r" --(?: |$)|#", one.removeprefix("dynamiccl "))[0].split()
        names = [f"dynamiccl {' '.join(words[:n])}" for n in (2, 1)]
        name = next((name for name in names if name in options), None)
        if one.startswith("dynamiccl ") and not words[0].startswith("-"):
            assert name, f"{path.name}: no command in {one!r}"
        known = {option for word in options.get(name, ()) for option in word.split("/")} | {"--help"}
        asked = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert name is None or asked <= known, f"{path.name}: {asked - known} in {one!r}"


@pytest.mark.parametrize("path", READMES, ids=name_of)
def test_every_test_that_a_page_names_exists(path):
    """But for the notebook, which tells of what was."""
    named = set(re.findall(r"\btests/[\w/]+\.(?:py|c)\b", path.read_text(encoding="utf-8")))
    assert path.name.startswith("LOG") or sorted(n for n in named if not (ROOT / n).exists()) == []


MARKS = ("real NCCL", "stand-in", "model", "records", "no NCCL", "none")


def test_the_page_has_each_fault_that_the_job_notices_and_no_other():
    """All others are in the list alone: there the job trains on as without the tuner."""
    table = DEPLOYMENT.read_text("utf-8").partition("In these rows the job notices the tuner.")[2]
    lines = table.partition("\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [line.split("|")[1].replace("`", "").strip() for line in lines]
    assert sorted(cells) == sorted(one["row"] for one in FAULTS.values() if one.get("noticed"))
    assert len(cells) > 5
    assert all("noticed" in fault or len(fault["effect"]) > 5 for fault in FAULTS.values())


def test_each_fault_says_what_shows_it():
    """By a test, or by a public report or a source where there is none."""
    begins = re.compile("(" + "|".join(MARKS) + r")\b")
    for name, fault in FAULTS.items():
        assert begins.match(fault["shown_by"]), name
        assert fault.get("tests") or fault["shown_by"].startswith("none: "), name


def test_the_deployment_page_has_every_variable_of_ours_and_no_other():
    page = DEPLOYMENT.read_text(encoding="utf-8")
    sources = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".c", ".h")]
    texts = [p.read_text("utf-8") for p in sources]
    read = {n for text in texts for n in re.findall(r"[\"'](DYNAMICCL_[A-Z_]+[A-Z])[\"']", text)}
    told = set(re.findall(r"DYNAMICCL_[A-Z_]+[A-Z]", page))
    assert "DYNAMICCL_RUN" in read and read == told
    theirs = set(re.findall(r"\b(?:NCCL|GLOO|TORCH|TORCHELASTIC|SLURM|XDG)_[A-Z_]+[A-Z]\b", page))
    unread = [n for n in theirs if not any(n in text for text in texts)]
    torchruns = ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert sorted(unread) == [
        "SLURM_JOB_NODELIST",
        "SLURM_NNODES",
        "SLURM_RESTART_COUNT",
        *torchruns,
    ]  # in the example


def test_the_page_lists_every_metric_in_its_words():
    listed = {row[0].strip("`"): row[1] for row in rows(DEPLOYMENT) if row[0].startswith("`dynamiccl_")}
    assert listed == {name: words for name, _, words in METRICS}


def test_the_page_lists_what_loggers_get():
    listed = {
        row[0].strip("`") for row in rows(ROOT / "docs" / "report.md") if row[0].startswith("`dynamiccl/")
    }
    assert listed == set(KEYS)


def words_in_source(path, kind):
    """The fields of a dataclass and the words behind them."""
    text = (ROOT / path).read_text(encoding="utf-8")
    body = text.partition(f"class {kind}:")[2].partition("@property")[0]
    return dict(re.findall(r"(?m)^    (\w+): (?:Any|Array)  # (.*)$", body))


def test_the_page_lists_what_an_observation_holds():
    """Before: three lists that nobody had, and 383 entries in words for 380."""
    page = ROOT / "docs" / "environments.md"
    named = [(re.findall(r"`(\w+)`", row[0]), row[1:]) for row in rows(page) if row[0].startswith("`")]
    table = {name: cells for names, cells in named for name in names}
    assert {name: table[name] for name in FEATURES} == {name: [words] for name, words in FEATURES.items()} | {
        "share": table["share"]
    }
    listed = [row for row in rows(page) if row[0].startswith("`") and len(row) == 3]
    words = words_in_source("envs/search/observation.py", "Context")
    words |= words_in_source("envs/search/observation.py", "Seen")
    scales = CONTEXT | FIGURES
    assert [row[0].strip("`") for row in listed] == [*CONTEXT, *FIGURES]
    for name, scale, meaning in listed:
        assert float(Fraction(scale)) == pytest.approx(scales[name.strip("`")]), name
        assert meaning == words[name.strip("`")], name
    text = page.read_text(encoding="utf-8")
    n_open = N_CONFIGS - len(NEVER_OPEN) - 1
    of_configs = N_OBSERVATION - len(FEATURES) - len(CONTEXT) - n_open
    assert (
        f"the slot ({len(FEATURES)}) and the search ({len(CONTEXT)}). {of_configs} describe the settings. {n_open} "
        in text
    )
    assert f"(-4, 4, ({N_OBSERVATION},))" in text and f"{len(NEVER_OPEN)} of the {N_CONFIGS}" in text


def test_the_page_lists_the_settings_and_the_info():
    table = rows(ROOT / "docs" / "environments.md")
    pairs = next(row[1:] for row in table if row[0] == "pair")
    counts = next(row[1:] for row in table if row[0] == "count: channels")
    for config in range(N_CONFIGS):
        pair, count = divmod(config, 8)
        decision = decision_of(config)
        assert pairs[pair].strip("`") == (
            "/".join([decision.algo, decision.proto]) if decision.algo else "left to NCCL"
        )
        assert counts[count] == (str(decision.n_channels) if decision.n_channels else "left to NCCL")
    two = [row[0] for row in table if len(row) == 2 and row[0].startswith("`")]
    listed = {name for cell in two for name in re.findall(r"`(\w+)`", cell)}
    _, info = gymnasium.make("dynamiccl/Sim-v0").reset(seed=0)
    assert {*info, "ended"} <= listed


def test_the_page_lists_every_preset_of_a_cluster():
    text = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    listed = [re.findall(r"`([\w-]+)`", row[0]) for row in rows(ROOT / "docs" / "start.md")]
    presets = re.findall(r"(?m)^\[([\w-]+)\]$", (ROOT / "envs/nccl_model/clusters.toml").read_text("utf-8"))
    assert sorted(presets) == sorted(name for names in listed for name in names if name in presets)
    assert "`advise` also predicts" in text and len(presets) > 10


def test_pages_name_the_median_gain_of_the_suite():
    """Before: 5.5 %, of suites that are gone."""
    suite = json.loads((ROOT / "envs" / "bench" / SUITES["standard"]).read_text("utf-8"))
    gain = f"{np.median(suite['gain']):.1%}".replace("%", " %")
    for page, said in (
        ("README.md", f"half of the jobs of one suite have less than {gain} to gain"),
        ("docs/start.md", f"simulated jobs of the suite `standard` can gain less than {gain}"),
    ):
        assert said in " ".join((ROOT / page).read_text("utf-8").split())
    assert len(suite["gain"]) == 1000


def test_pages_and_make_name_the_jobs_that_the_boards_have():
    """Before: `make bench` played 200 jobs of each suite, the boards had 120, 60 and 60."""
    jobs = {suite: filed(suite)["submissions"][0]["jobs"] for suite in SUITES}
    read = {
        page: (ROOT / page).read_text("utf-8")
        for page in ("Makefile", "docs/environments.md", "docs/evidence.md")
    }
    assert dict(re.findall(r"([a-z-]+):(\d+)", re.search(r"for board in (.*?);", read["Makefile"])[1])) == {
        suite: str(n) for suite, n in jobs.items()
    }
    for suite, n in jobs.items():
        assert f"--suite {suite} --jobs {n}`" in read["docs/environments.md"]
        assert f"{n} " in read["docs/evidence.md"].partition("the rule loses less")[2].partition("|")[2][:99]
    assert ", ".join(map(str, jobs.values())) in (ROOT / "envs/results/README.md").read_text("utf-8")


def test_the_snippet_of_the_environments_runs():
    page = (ROOT / "envs" / "README.md").read_text(encoding="utf-8")
    snippet = re.search(r"```python\n(.*?)```", page, re.S)[1]
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # Names and a gain: before, six indices that were all zero.
    table, gain = done.stdout.splitlines()
    assert re.fullmatch(r"current table:( (ring|nvls|pat)/(ll|ll128|simple)(/\d+)?)+", table)
    steps, saved = map(
        int, re.fullmatch(r"in (\d+) steps the time of (\d+) of the default was saved", gain).groups()
    )
    assert saved > 0.01 * steps


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)


def test_the_snippet_of_a_recorded_job_runs(tmp_path):
    write_run(tmp_path / "runs" / "demo" / "trace", search=40, final=6)
    (snippet,) = snippets("docs/environments.md")
    command = [sys.executable, "-c", snippet]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert re.fullmatch(r".+ \d+ steps, -?\d+\.\d default steps saved\n", done.stdout), done.stderr


@pytest.mark.slow
def test_the_snippet_of_a_running_job_runs():
    """On the emulated cluster, with a job that ends before the search."""
    variables = json.loads(run("env", "--json", "--cluster", "dgx-h100-2x8").stdout)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    script = str(ROOT / "examples" / "scripts" / "fsdp2.py")
    (snippet,) = snippets("docs/environments.md")
    with subprocess.Popen([*torchrun, script, "60"], env=env | variables, stdout=subprocess.DEVNULL) as job:
        command = [sys.executable, "-c", snippet, variables["DYNAMICCL_RUN"]]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
        assert job.wait(120) == 0
    assert re.search(r" \d+ steps, -?\d+\.\d default steps saved\n$", done.stdout), done.stderr


@pytest.mark.slow
def test_the_entrant_of_the_environments_plays(tmp_path):
    page = (ROOT / "envs" / "README.md").read_text(encoding="utf-8")
    entrant = re.findall(r"```python\n(.*?)```", page, re.S)[1]
    (tmp_path / "my_module.py").write_text(entrant)
    command = [
        sys.executable,
        "-m",
        "dynamiccl.agent.cli",
        "bench",
        "--policy",
        "my_module:MyPolicy",
        "--jobs",
        "4",
    ]
    wide = {**os.environ, "COLUMNS": "160"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=wide)
    assert done.returncode == 0 and "my_module:MyPolicy" in done.stdout and "4 of 1000 jobs" in done.stdout


def test_readmes_first_screen_is_short():
    """What, for whom, how much, how to start: at most 150 words, with the commands."""
    text = (ROOT / "README.md").read_text("utf-8")
    screen = text[text.index("\n\n") : text.index("![")]
    assert len([word for word in screen.split() if any(map(str.isalnum, word))]) <= 150
    for word in (
        "FSDP2",
        "ZeRO-3",
        "DDP",
        "No GPU has shown a gain yet",
        "counted, not waited",
        "make demo",
        "tune",
        "show",
        "stop",
    ):
        assert word in screen
