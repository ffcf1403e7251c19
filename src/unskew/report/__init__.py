"""Show me: one self-contained page."""

from unskew.report._html import render as render
