"""What each rule on attention backends means here, and the tests that cite it."""

from __future__ import annotations

from collections.abc import Mapping

from rule_book import RuleBook

__all__ = ["BOOK", "RULES"]

RULES: Mapping[str, str] = {
    # Interface and selection
    "R5.1": "a layer holds one object that computes, and knows no backend by name",
    "R5.2": "a backend is a name, answers, builders and computations; kernels change behind it",
    "R5.3": "candidates are asked in order, and no refusal is lost",
    "R5.4": "a backend that was named is taken or explains itself; strangers can be named",
    "R5.5": "everything is decided at the start, for every kind of layer",
    # Capabilities
    "R5.10": "FlashAttention computes in half formats, over these or 8-bit floats",
    "R5.11": "what a cache may hold depends on the device as well",
    "R5.12": "a combination is judged as a whole, and refused with a reason",
    "R5.13": "sinks, 8-bit caches and multimodal prefixes need their device and generation",
    "R5.14": "head sizes, capabilities and kinds have limits, per generation",
    "R5.15": "blocks are of sizes that kernels take, or are divided into such",
    "R5.16": "all of that is decided for devices that are only described",
    # Metadata
    "R5.20": "a step's rows are told by counts, offsets, lengths, tables and slots",
    "R5.21": "a common prefix is told apart from what follows it",
    "R5.22": "contexts that ranks share are told by each rank's own lengths",
    "R5.23": "schedules, splits, causality, ranges and prompts come only where used",
    "R5.24": "causality that differs by row is for kernels that know it",
    # Building it
    "R5.30": "metadata is built in one order of steps",
    "R5.31": "schedules are made ahead for one generation, unless in haste or batch-invariant",
    "R5.32": "windows are collected once layers exist; several rule out schedules",
    "R5.33": "splits are bound only in captured steps, and to one where bits must not change",
    "R5.34": "a stored schedule leaves nothing of the one before behind it",
    "R5.35": "shared contexts go before common prefixes, these before plain steps",
    "R5.36": "building waits for no device",
    "R5.37": "ranges and prompt lengths are copied only where the batch has any",
    "R5.38": "buffers are made once, and filled in place",
    # Forward
    "R5.40": "without metadata the output is zeros and no cache is touched",
    "R5.41": "keys and values lie side by side, and are told apart by strides",
    "R5.42": "strides of single entries are made regular for kernels that mind",
    "R5.43": "the plain path takes offsets, lengths and tables, and scales as views",
    "R5.44": "a causal window opens to both sides where attention is not causal",
    "R5.45": "a layer's own window wins over its group's",
    "R5.46": "encoders see the step's own keys on both sides",
    "R5.47": "what is read by pages equals what lies in a row",
    "R5.48": "padding changes no real row",
    # Masks
    "R5.50": "ranges add to what is visible, so the built-in masks are off with them",
    "R5.51": "masks of ranges are for one generation and static causality",
    "R5.52": "queries of a later chunk are placed by the row's length",
    "R5.53": "a mask is made once for its parameters",
    "R5.54": "a mask reads its ranges one query at a time",
    "R5.55": "a kept prompt is visible beside the window",
    "R5.56": "masks are held against a plain matrix",
    # Heads of 256
    "R5.60": "that kernel reads whole pages, as many as the longest row has, unsplit",
    "R5.61": "it shares no prefixes, and leaves windowed encoders to another generation",
    # Writing the cache
    "R5.70": "writing is an operation of its own",
    "R5.71": "as many tokens are written as there are slots",
    "R5.72": "negative slots write nothing",
    # Cascade
    "R5.80": "short prefixes, biases, windows, few rows and shared contexts rule cascades out",
    "R5.81": "otherwise they are used, unless plain decoding would split",
    "R5.82": "then an estimate decides, which can be replaced",
    "R5.83": "parts merge by log-sum-exp into what plain attention gives",
    # Contexts over ranks, drafts
    "R5.90": "metadata is updated for drafts only where one rank holds a context",
    "R5.91": "a rank's share of a context is bound from above, and padding is zero",
    "P5.1": "no stale entry of a schedule acts on a smaller batch",
    "P5.2": "a wrong layout is found out",
    "P5.3": "degenerate strides reach no kernel that refuses them",
    "P5.4": "no built-in mask hides what a range shows",
    "P5.5": "no forward compiles a mask anew",
    "P5.6": "no chunk is taken for a row's first",
    "P5.7": "views between graphs are few, and counted",
    "P5.8": "no draft step misses a part of its context",
    "P5.9": "nothing is allocated while a graph is captured",
    "P5.10": "no global layer looks through its group's window",
    "I5.1": "block ids, order of rows and padding change no answer",
    "I5.2": "chunks, cascades and ranks give what one pass gives",
    "I5.3": "what is accepted is computed",
    "I5.4": "buffers keep their addresses, and none is added",
    "I5.5": "building depends on nothing but its input",
}

BOOK = RuleBook(
    rules=RULES,
    complete=(5,),
    page="docs/reference/attention-rules.md",
    title="Rules of attention backends, and the tests that hold them",
    introduction=(
        "`R` are requirements, `P` pitfalls and `I` invariants of the specification of attention backends and paged",
        "attention (5). A test cites a rule by its number: `grep -rn R5.34 --include=*.py` finds all of them, this",
        "page names a few.",
    ),
)
