"""What ``from helios.core import ...`` finds; imported when the first of these names is used."""

from helios.core import cuda as cuda
from helios.core import distributed as distributed
from helios.core import logging as logging
from helios.core import rng as rng
from helios.core.registry import Registry as Registry
from helios.core.registry import update_all_registries as update_all_registries
from helios.core.utils import AverageTimer as AverageTimer
from helios.core.utils import ChdirContext as ChdirContext
from helios.core.utils import convert_to_list as convert_to_list
from helios.core.utils import get_env_info_str as get_env_info_str
from helios.core.utils import get_from_optional as get_from_optional
from helios.core.utils import safe_torch_load as safe_torch_load
