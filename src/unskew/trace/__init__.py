"""What was recorded? Schema, reading and writing, lint."""

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
