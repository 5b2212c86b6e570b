"""What each rule on executors, the runner and the forward context means here, and the tests that cite it."""

from __future__ import annotations

from collections.abc import Mapping

from rule_book import RuleBook

__all__ = ["BOOK", "RULES"]

RULES: Mapping[str, str] = {
    # Executor
    "R4.1": "the engine asks for a step to be executed; by whom and over what is the executor's affair",
    "R4.2": "one primitive, a call to all workers, carries everything else",
    "R4.3": "what an executor can do is known before there is one, and asking for more stops the start",
    "R4.4": "a new executor sleeps under no tag and gathers no connector's outputs until one needs it",
    "R4.5": "executors are chosen by class, by name or by qualified name, and checked to be executors",
    "R4.6": "built-in executors are found the way everybody else's are",
    "R4.7": "calls carry orders; bulk data has channels of its own",
    "R4.8": "equal ranks answer alike, so that one answer is the step's",
    "R4.9": "a call that does not wait yields a future, and the order of calls is kept",
    "R4.10": "a forward may leave sampling for later; sampling always yields an output",
    "R4.11": "tasks are asked for once",
    "R4.12": "a worker's error arrives with its rank and traceback; what the others answered is not lost",
    # Construction and deferred state
    "R4.20": "adapters, connectors and encoders are parts of a runner that may each be missing",
    "R4.21": "what a runner is for is settled when it is made, and asked of nobody who need not know",
    "R4.22": "what sampling needs of a forward is one frozen record, used up by sampling",
    # State
    "R4.30": "finished requests leave first, so that an id may end and begin in one step",
    "R4.31": "new blocks are cleared before anybody reads them",
    "R4.32": "rows that are not scheduled, or are scheduled anew, leave",
    "R4.33": "new requests bring their own stream of draws and their positions",
    "R4.34": "running requests append blocks, resumed ones replace them",
    "R4.35": "rows are added, holes closed, rows ordered and metadata refreshed, one after the other",
    "R4.36": "only a model without any cache has no order of rows",
    "R4.37": "drafts count as accepted until the launched forward is done, and are corrected then",
    "R4.38": "steps ahead yield the tokens of steps in turn",
    # Input ids
    "R4.40": "without samples on the device, ids come from the host",
    "R4.41": "the last samples are placed where their requests' last tokens are",
    "R4.42": "new rows come from the host before samples are placed",
    "R4.43": "where no request stays, the host's ids are all",
    "R4.44": "a plain copy serves only rows that have kept their places",
    "R4.45": "no scheduled position is left undefined",
    "R4.46": "embeddings and what marks them take the ways of ids",
    # Slots and block tables
    "R4.50": "a token's slot follows from its block and its place within",
    "R4.51": "layers of a group share one mapping, whichever way they look it up",
    "R4.52": "groups without a cache map to nothing; the others see a part of one buffer",
    "R4.53": "padding tokens have no slot, and no byte of the cache changes for them",
    "R4.54": "padding rows hold the null block",
    "R4.55": "buffers never move",
    # Forward context
    "R4.60": "all that layers may ask of a step is in one record",
    "R4.61": "a shape's key has as few fields as possible, the count of adapters among them",
    "R4.62": "a scope sets the context and puts the former one back, whatever happens",
    "R4.63": "who asks outside a scope is told how to enter one",
    "R4.64": "the setter adds what ranks, shapes and platforms need",
    "R4.65": "input of encoders goes around compiled code",
    "R4.66": "the padding mask may save work and changes no real row",
    "R4.67": "mixtures of experts take their names in turn, all of them in each forward",
    "R4.68": "a step has one order, and its shape is settled before metadata is built",
    # Asynchronous output
    "R4.70": "outputs are copied on a stream of their own, which waits for the forward",
    "R4.71": "who waits for a copy sleeps",
    "R4.72": "device tensors are let go only after the copy is done",
    "R4.73": "rows with nothing to say come back empty",
    "P4.1": "no row keeps blocks that were taken from it",
    "P4.2": "no way to fill in ids leaves some out",
    "P4.3": "tokens find their requests after rows were reordered",
    "P4.4": "stale values are never read",
    "P4.5": "an id that ends and begins in one step is two requests",
    "P4.6": "no memory is freed under a copy",
    "P4.7": "the host is not kept busy with waiting",
    "P4.8": "correcting neither delays the launch nor is forgotten",
    "P4.9": "recurrent models are ordered as others are",
    "P4.10": "nothing depends on a context that nobody set",
    "P4.11": "names taken in a wrong order or number are found out",
    "P4.12": "what never changes is not asked again",
    "P4.13": "graphs of a larger shape leave the cache alone",
    "I4.1": "rows are the scheduled requests, dense and one each",
    "I4.2": "tables and counts are the scheduler's",
    "I4.3": "slots are unique, within a request's blocks and never in the null block",
    "I4.4": "prepared ids are those of a batch built from nothing",
    "I4.5": "no forward, failed or not, leaves a context behind",
    "I4.6": "forward and sampling take turns",
    "I4.7": "executors agree on the same work",
}

BOOK = RuleBook(
    rules=RULES,
    complete=(4,),
    page="docs/reference/runner-rules.md",
    title="Rules of executors, the runner and the forward context, and the tests that hold them",
    introduction=(
        "`R` are requirements, `P` pitfalls and `I` invariants of the specification of executors, the model runner and",
        "the forward context (4). A test cites a rule by its number: `grep -rn R4.53 --include=*.py` finds all of",
        "them, this page names a few.",
    ),
)
