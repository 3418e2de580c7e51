"""The public names of a learned bias. `bmt_burst/bias` implements it."""

from .bias.areas import BY_DISTANCE as BY_DISTANCE
from .bias.areas import Term as Term
from .bias.areas import is_one_row as is_one_row
from .bias.scores import Scores as Scores
from .bias.scores import distance_rows as distance_rows
