"""Conformance of the plugin kind ``attention_backend``: derive from :class:`AttentionBackendSuite` and name yours.

Every requirement a backend accepts (``objection`` is None) must be computed correctly; what it refuses is skipped, and
the skip says why.
"""

from __future__ import annotations

from hardpoint_testing_torch.attention_answers_suite import AttentionAnswerRules
from hardpoint_testing_torch.attention_cache_suite import AttentionCacheRules
from hardpoint_testing_torch.attention_lse_suite import AttentionLseRules
from hardpoint_testing_torch.attention_mask_suite import AttentionMaskRules
from hardpoint_testing_torch.attention_ranks_suite import AttentionRankRules
from hardpoint_testing_torch.attention_selection_suite import AttentionSelectionRules
from hardpoint_testing_torch.attention_step_suite import AttentionStepRules

__all__ = ["AttentionBackendConformance", "AttentionBackendSuite"]


class AttentionBackendSuite(
    AttentionMaskRules,
    AttentionCacheRules,
    AttentionStepRules,
    AttentionLseRules,
    AttentionRankRules,
    AttentionSelectionRules,
    AttentionAnswerRules,
):
    """The contract of :class:`~hardpoint.interfaces.attention.AttentionBackend`.

    Set ``plugin`` to the name of an installed backend, or override the fixture ``backend``. Each part may also be
    derived from alone: masks and scores, caches, steps, log-sum-exps, shared contexts, selected keys, answers.
    """


AttentionBackendConformance = AttentionBackendSuite
"""The same under the name by which rules of other kits go."""
