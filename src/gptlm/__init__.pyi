from gptlm.api.inference import evaluate as evaluate
from gptlm.api.inference import generate as generate
from gptlm.api.inference import load as load
from gptlm.api.results import Evaluation as Evaluation
from gptlm.api.results import Generation as Generation
from gptlm.api.results import Loaded as Loaded
from gptlm.api.results import TrainResult as TrainResult
from gptlm.api.training import pretrain as pretrain
from gptlm.api.training import sft as sft
from gptlm.errors import GptlmError as GptlmError
from gptlm.errors import UsageError as UsageError
from gptlm.training.trainer import GPTTrainer as GPTTrainer

__version__: str
