"""The world: data with three splits, hosts for it, and how they are trained."""

from esper.growth.standalone import portable_host
from esper.tasks import cifar10, digits, mixed, mnist1d, stories, text  # noqa: F401  (they register themselves)
from esper.tasks.data import Split, Splits, check_split, crop_and_flip, draw_crops
from esper.tasks.hosts import Conv1dHost, Conv2dHost, GPTHost, MLPHost
from esper.tasks.registry import Task, cross_entropy, load_task, percent_correct, task, task_names, task_options

__all__ = [
    "Split",
    "Splits",
    "Task",
    "check_split",
    "crop_and_flip",
    "cross_entropy",
    "draw_crops",
    "load_task",
    "percent_correct",
    "task",
    "task_names",
    "task_options",
]

for _host in (MLPHost, Conv1dHost, Conv2dHost, GPTHost):  # here, because `hosts.py` itself imports torch alone
    portable_host(_host)
