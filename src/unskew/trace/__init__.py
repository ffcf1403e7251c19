"""What was recorded? Schema, reading and writing, lint."""

from unskew.trace._schema import SCHEMA as SCHEMA
from unskew.trace._schema import SCHEMA_VERSION as SCHEMA_VERSION
from unskew.trace._schema import TOKEN_COLUMNS as TOKEN_COLUMNS
from unskew.trace._trace import Trace as Trace
