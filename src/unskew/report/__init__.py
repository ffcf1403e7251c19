"""Show me: one self-contained page, or a comment in Markdown."""

from unskew.report._html import render as render
from unskew.report._markdown import markdown as markdown
