"""Read, measure and change the attention of any PyTorch model from outside."""

from overt.capture.call import Call, Route
from overt.capture.coverage import Unseen
from overt.capture.edits import Bias
from overt.capture.places import attention_modules
from overt.capture.seen import Seen
from overt.capture.watching import watch

__all__ = ["Bias", "Call", "Route", "Seen", "Unseen", "attention_modules", "watch"]
