"""Is it going wrong now? Recording from inside a trainer."""

from unskew.watch._trl import TRLRecorder as TRLRecorder
