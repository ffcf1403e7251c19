"""Can I see it happen? Tiny models and their task, trained here, to plant faults in."""

from unskew.lab._models import MODEL_NAMES as MODEL_NAMES
from unskew.lab._models import model_path as model_path
from unskew.lab._models import recorded_path as recorded_path
from unskew.lab._task import Problem as Problem
from unskew.lab._task import documents as documents
from unskew.lab._task import problem_of as problem_of
from unskew.lab._task import prompts as prompts
from unskew.lab._task import reward as reward
