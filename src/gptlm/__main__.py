"""`python -m gptlm COMMAND ...`"""

import sys

from gptlm.cli import main

sys.exit(main())
