"""The public names for scripts on BMTrain. `bmt_burst/adapters/bmtrain.py` implements them."""

from .adapters.bmtrain import BurstAttention as BurstAttention
from .adapters.bmtrain import LightningAttention as LightningAttention
from .adapters.bmtrain import distribute as distribute
