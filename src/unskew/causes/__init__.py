"""What could be wrong? One class a cause, one file or two an id prefix."""

from collections.abc import Mapping

from unskew.causes import (
    _config,
    _estimator,
    _floor,
    _mode,
    _numerics,
    _penalty,
    _position,
    _record,
    _routing,
    _rows,
    _sampling,
    _silent,
    _template,
    _weights,
)
from unskew.causes._base import CLIP_NATS as CLIP_NATS
from unskew.causes._base import Cause as Cause
from unskew.causes._base import Counterfactual as Counterfactual
from unskew.causes._base import Facts as Facts
from unskew.causes._base import Gap as Gap
from unskew.causes._base import Intervention as Intervention
from unskew.causes._base import Parameter as Parameter
from unskew.causes._base import Reading as Reading
from unskew.causes._fit import fit_pair as fit_pair
from unskew.causes._fit import probe as probe

CAUSES: Mapping[str, Cause] = {
    cause.id: cause
    for cause in (
        _sampling.Temperature(), _sampling.TemperatureRaw(), _sampling.TemperatureAfterSoftmax(), _sampling.TopP(),
        _sampling.TopK(), _sampling.MinP(), _penalty.RepetitionPenalty(), _penalty.PresencePenalty(), _penalty.FrequencyPenalty(), _penalty.LogitBias(), _penalty.MinTokens(), _penalty.Grammar(), _penalty.Greedy(), _silent.Silent(), _record.Shift(), _rows.PromptInMask(), _rows.PaddingInMask(), _rows.ToolInMask(), _rows.EosDropped(), _rows.Truncated(), _rows.StopTrimmed(), _rows.ImageExpansion(),
        _record.SyntheticEos(), _record.FilledLogp(), _record.RowOrder(), _record.WrongToken(), _record.LogpUnit(), _record.ChunkBoundary(), _record.RowPairing(), _rows.Retokenized(), _template.Bos(), _template.Prompt(), _template.History(),
        _position.LeftPad(), _position.Packing(), _weights.Stale(), _weights.AdapterMissing(), _weights.AdapterTwice(),
        _weights.TiedHead(), _weights.PartialSync(), _weights.Quantized(), _weights.StalePrefixCache(), _weights.RecomputeHides(),
        _config.Rope(), _config.AttentionScale(), _config.SlidingWindow(), _config.Softcap(), _config.NormEps(), _config.VocabPadding(),
        _numerics.Head(), _numerics.KVCache(), _numerics.Activations(), _numerics.TensorParallel(), _numerics.AttentionKernel(),
        _numerics.FusedKernel(), _numerics.RopePrecision(), _numerics.LogpStorage(), _numerics.Body(), _mode.TrainMode(), _routing.Flips(),
        _estimator.SequenceWeight(), _floor.Noise(),
    )
}  # fmt: skip
"""Every cause by its id."""
