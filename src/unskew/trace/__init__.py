"""What was recorded? Schema, reading and writing, lint."""

from unskew.trace._findings import LintFinding as LintFinding
from unskew.trace._findings import LintReport as LintReport
from unskew.trace._layout import pack as pack
from unskew.trace._layout import pad as pad
from unskew.trace._layout import padding_mask as padding_mask
from unskew.trace._lint import lint as lint
from unskew.trace._lint import usable as usable
from unskew.trace._read import iter_read as iter_read
from unskew.trace._read import read as read
from unskew.trace._read import read_manifest as read_manifest
from unskew.trace._schema import LOGP_COLUMNS as LOGP_COLUMNS
from unskew.trace._schema import REQUIRED as REQUIRED
from unskew.trace._schema import SCHEMA as SCHEMA
from unskew.trace._schema import SCHEMA_VERSION as SCHEMA_VERSION
from unskew.trace._schema import SEGMENT_FORCED as SEGMENT_FORCED
from unskew.trace._schema import SEGMENT_PADDING as SEGMENT_PADDING
from unskew.trace._schema import SEGMENT_PROMPT as SEGMENT_PROMPT
from unskew.trace._schema import SEGMENT_SAMPLED as SEGMENT_SAMPLED
from unskew.trace._schema import SEGMENT_TEMPLATE as SEGMENT_TEMPLATE
from unskew.trace._schema import SEGMENT_TOOL as SEGMENT_TOOL
from unskew.trace._schema import TOKEN_COLUMNS as TOKEN_COLUMNS
from unskew.trace._trace import Trace as Trace
from unskew.trace._write import Writer as Writer
from unskew.trace._write import write as write
