"""From a profile to a plan: pure functions on records. Nothing here imports torch.

region graph -> recipes -> menus (measured elsewhere) -> profile -> schedule -> plan -> simulate
"""

from remat.planner.bounds import least_budget, time_lower_bound
from remat.planner.frontier import FrontierPoint, frontier
from remat.planner.link import LinkPoint, LinkUse, Transfer
from remat.planner.menu import check_recipe, finish, least_resident_bytes, recipes, solve, working_set_bytes
from remat.planner.schedule import keep_everything, make_plan, schedule
from remat.planner.simulate import Point, Timeline, simulate
from remat.planner.strategies import Row, compare

__all__ = [
    "FrontierPoint",
    "LinkPoint",
    "LinkUse",
    "Point",
    "Row",
    "Timeline",
    "Transfer",
    "check_recipe",
    "compare",
    "finish",
    "frontier",
    "keep_everything",
    "least_budget",
    "least_resident_bytes",
    "make_plan",
    "recipes",
    "schedule",
    "simulate",
    "solve",
    "time_lower_bound",
    "working_set_bytes",
]
