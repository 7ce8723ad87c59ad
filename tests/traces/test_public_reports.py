"""Files of other tools as strangers reported them: whose rank they are, what is left out, no share above 100 %."""

import gzip
import json

import pytest
from command import invoke
from dynamiccl.traces.files import TraceError
from dynamiccl.traces.importers.recording import read_recording
from test_traces_importers import kineto, without_steps

CLUSTER = ("--cluster", "dgx-h100-2x8")


def advised(*paths):
    """What ``advise`` says, for programs."""
    result = invoke(["advise", *map(str, paths), *CLUSTER, "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def unsigned(rank, **kind):
    """A profile that does not say its rank itself: before PyTorch's distributedInfo, or without a process group."""
    document = kineto(rank, **kind)
    del document["distributedInfo"]
    return document


def put(folder, name, document):
    path = folder / name
    text = json.dumps(document)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def nameless(document):
    """Without what tells the rank in the arguments of calls."""
    for event in document["traceEvents"]:
        event.get("args", {}).pop("Rank", None)
    return document


# Whose rank (torchtune#2504, kineto#974, HTA#104) -------------------------------------------------------------

#: Names of two files, of which nothing but the name tells the rank; the ranks, or None where the name does not.
NAMES = {
    "torchtune": (["r0-2025-3-14-16-24.1741994642707396628.pt.trace.json.gz"], [0]),
    "two of torchtune": (
        [f"r{i}-2025-3-14-16-24.174199464270739662{i}.pt.trace.json.gz" for i in (0, 1)],
        [0, 1],
    ),
    "rank": (["trace_rank_5.json"], [5]),
    "Rank": (["Rank-12.json"], [12]),
    "host, process and time": (["node7_88120.1741988781221064630.pt.trace.json"], None),
    "date": (["2025-03-14.json"], None),
}


@pytest.mark.parametrize("name", NAMES)
def test_no_date_time_or_process_in_a_name_is_a_rank(tmp_path, name):
    """Before: both files of torchtune's were rank 24, the minute, and added up to 108.1 % of the step."""
    names, ranks = NAMES[name]
    for order, file in enumerate(names):
        put(tmp_path, file, nameless(unsigned(order)))
    trace = read_recording([tmp_path])
    assert sorted(trace.events["rank"].unique()) == (ranks or [0])
    said = any("does not say which rank it is of: taken to be rank 0" in n for n in trace.header["notes"])
    assert said == (ranks is None)


def test_what_the_calls_say_tells_the_rank(tmp_path):
    for rank in (0, 1):
        put(tmp_path, f"node7_{88120 + rank}.17419887812210646{rank}0.pt.trace.json", unsigned(rank))
    trace = read_recording([tmp_path])
    assert sorted(trace.events["rank"].unique()) == [0, 1] and trace.header["notes"] == []
    calls = [e["args"] for e in unsigned(0)["traceEvents"] if "Rank" in e.get("args", {})]
    for args in calls:  # the place in a group of others
        args |= {"Process Group Ranks": "[8, 9, 10]", "Process Group Description": "mesh", "Rank": 2}
    document = unsigned(0)
    for event in document["traceEvents"]:
        if "Rank" in event.get("args", {}):
            event["args"] = {**event["args"], **{k: calls[0][k] for k in ("Process Group Ranks", "Rank")}}
    (tmp_path / "alone").mkdir()
    assert set(read_recording([put(tmp_path / "alone", "a.json", document)]).events["rank"]) == {10}


def test_two_files_that_do_not_say_their_rank_are_refused(tmp_path):
    for rank in (0, 1):
        put(tmp_path, f"node7_8812{rank}.174198878.pt.trace.json", nameless(unsigned(rank)))
    with pytest.raises(
        TraceError, match=r"node7_88120.*does not say which rank it is of: name the files rank0"
    ):
        read_recording([tmp_path])


def test_two_files_of_one_rank_with_the_same_steps_are_refused_by_name(tmp_path):
    """Before: two runs in one folder were added up."""
    first = put(tmp_path, "host_1.17000.pt.trace.json", kineto(0))
    other = put(tmp_path, "host_2.18000.pt.trace.json", kineto(0, kernels=False))
    for paths in ([tmp_path], [first, other]):
        with pytest.raises(
            TraceError, match=r"host_1\..*host_2\..*both hold step 7 of rank 0: give one file a rank"
        ):
            read_recording(paths)


def test_two_files_of_one_rank_without_steps_are_not_added_up(tmp_path):
    for name, document in (("a.json", kineto(0)), ("b.json", kineto(0, kernels=False))):
        put(tmp_path, name, without_steps(document))
    with pytest.raises(TraceError, match=r"a\.json and .*b\.json both hold rank 0, and one marks no steps"):
        read_recording([tmp_path])


def test_two_files_of_one_rank_with_other_steps_are_one_recording(tmp_path):
    """A profiler's schedule with ``repeat`` leaves them."""
    put(tmp_path, "host_1.17000.pt.trace.json", kineto(0, steps=(2, 3)))
    put(tmp_path, "host_1.18000.pt.trace.json", kineto(0, steps=(12, 13)))
    trace = read_recording([tmp_path])
    assert trace.steps["index"].tolist() == [2, 3, 12, 13] and set(trace.events["rank"]) == {0}


# What is left out (chakra#178, pytorch#131462) ----------------------------------------------------------------


def silenced(document, which):
    """Without what tells the collective of the calls whose number ``which`` takes."""
    for event in document["traceEvents"]:
        args = event.get("args", {})
        if "External id" in args and which(args["External id"]):
            kept = {"External id": args["External id"], "grid": args.get("grid"), "stream": 20}
            event["args"] = kept
    return document


def test_what_looks_like_nccl_and_is_left_out_is_counted_with_its_share(tmp_path):
    """Before: dropped without a word, 27 % told where 54 % was true."""
    whole = advised(put(tmp_path, "whole.json", kineto(0)))
    part = advised(put(tmp_path, "part.json", silenced(kineto(0), lambda number: number % 2)))
    assert part["communication"] < whole["communication"]
    assert part["communication"] + part["left_out"] >= whole["communication"]
    assert whole["left_out"] == 0 and "left out" not in " ".join(whole["unknown"])
    (note,) = [n for n in part["unknown"] if "record_shapes=True" in n]
    assert note.startswith("7 of ") and "% of NCCL's time" in note
    text = invoke(["advise", str(tmp_path / "part.json"), *CLUSTER]).stdout
    assert f"another {part['left_out']:.1%} in NCCL kernels that are left out" in text


@pytest.mark.parametrize(
    "kernel", ["ncclDevKernel_AllGather_RING_LL", "ncclKernel_AllGather_RING_LL_Sum_int8_t"]
)
def test_a_profile_without_metadata_names_record_shapes(tmp_path, kernel):
    """Before: "no collective in it that NCCL runs"."""
    document = silenced(kineto(0), lambda number: True)
    for event in document["traceEvents"]:
        if event.get("name", "").startswith("nccl"):
            event["name"] = kernel
    path = put(tmp_path, "a.json", document)
    result = invoke(["advise", str(path), *CLUSTER])
    assert (
        result.exit_code == 2
        and "record_shapes=True" in result.stderr
        and "14 calls of NCCL" in result.stderr
    )


def test_no_share_above_the_whole_is_printed(tmp_path):
    """Collectives on several streams at the same time."""
    document = kineto(0)
    for event in document["traceEvents"]:
        if event.get("name", "").startswith("nccl"):
            event["dur"] = 1400.0
    path = put(tmp_path, "a.json", document)
    told = advised(path)
    assert told["communication"] == 1.0 and all(slot["share"] <= 1 for slot in told["slots"])
    assert "how much of the step communicates: collectives ran at the same time" in told["unknown"]
    shares = [
        float(word[:-1])
        for word in invoke(["advise", str(path), *CLUSTER]).stdout.split()
        if word.endswith("%")
    ]
    assert shares and max(shares) <= 100


# Odd events (kineto#105, #1459, perfetto#598, TraceLens#1035 are in test_formats.py) --------------------------


def kernel_of(document):
    return next(e for e in document["traceEvents"] if e.get("name", "").startswith("ncclDev"))


def text_times(document):
    for event in document["traceEvents"]:
        if "ts" in event:
            event |= {"ts": str(event["ts"]), "dur": str(event["dur"])}


ODD = {
    "no duration": (lambda d: kernel_of(d).pop("dur"), 12, 1),
    "negative duration": (lambda d: kernel_of(d).update(dur=-5.0), 12, 1),
    "null duration": (lambda d: kernel_of(d).update(dur=None), 12, 1),
    "no name": (lambda d: kernel_of(d).update(name=None), 12, 1),
    "times as text": (text_times, 12, 0),
    "no information": (lambda d: d.update(distributedInfo="none"), 12, 0),
    "null information": (lambda d: d.update(distributedInfo=None), 12, 0),
    "numbers without end": (lambda d: kernel_of(d)["args"].update({"In msg nelems": 10**30}), 11, 0),
    "marks of two threads": (
        lambda d: d["traceEvents"].extend(
            [{**e, "tid": 9, "ts": e["ts"] + 400} for e in d["traceEvents"] if "Step#" in e["name"]]
        ),
        12,
        0,
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_one_odd_event_loses_no_other(tmp_path, name):
    """Before: most of these refused the whole file ("a field is not what PyTorch writes there")."""
    change, n_events, n_odd = ODD[name]
    document = kineto(0)
    change(document)
    trace = read_recording([put(tmp_path, "rank0.json", document)])
    assert len(trace.events) == n_events and len(trace.steps) == 2
    said = any("1 event without a time or a name" in note for note in trace.header["notes"])
    assert said == bool(n_odd)


def test_a_mark_of_byte_order_is_no_fault(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("\ufeff" + json.dumps(kineto(0)), encoding="utf-8")
    assert len(read_recording([path]).events) == 12


def test_symmetric_kernels_are_named(tmp_path):
    document = kineto(0)
    kernel_of(document)["name"] = "ncclSymkDevKernel_AllGather_LLMC(ncclSymkDevWorkArgs4K)"
    notes = read_recording([put(tmp_path, "a.json", document)]).header["notes"]
    assert notes == ["1 call ran a symmetric kernel, which no table reaches"]


def test_advice_for_fsdp2_is_conditional_unless_the_profile_shows_it(tmp_path):
    """Before: any reduce_scatter got FSDP2's setting."""
    document = kineto(0)
    assert advised(put(tmp_path, "a.json", document))["launch"][0].startswith(
        "only for a job that uses FSDP2"
    )
    mark = {
        "ph": "X",
        "cat": "user_annotation",
        "name": "FSDP::post_backward_reduce (b.3)",
        "ts": 1.0,
        "dur": 2.0,
    }
    document["traceEvents"].append(mark)
    assert advised(put(tmp_path, "b.json", document))["launch"][0].startswith("FSDP2 averages")


def test_show_reads_the_files_that_its_message_names(tmp_path):
    """Before: `show FILE.json.gz` said that `show` reads other tools' files, and refused it."""
    path = put(tmp_path, "rank0.json.gz", kineto(0))
    told = json.loads(invoke(["show", str(path), "--json"]).stdout)
    assert len(told["slots"]) == 2 and told["steps"]["n"] == 2
    text = invoke(["show", str(tmp_path)]).stdout
    assert "all_gather 17-32 KiB" in text and "a recording of another tool" in text
    (tmp_path / "note.txt").write_text("hello")
    result = invoke(["show", str(tmp_path / "note.txt")])
    assert result.exit_code == 2 and "is no recording that we know" in result.stderr
