"""Planning of training runs on clusters."""

from regard.training.planning.step_estimates import estimate_memory as estimate_memory
from regard.training.planning.step_estimates import estimate_step_time as estimate_step_time
from regard.training.planning.step_estimates import exposed_exchange as exposed_exchange
from regard.training.planning.step_estimates import model_cost as model_cost
from regard.training.planning.training_plan import TrainingPlan as TrainingPlan
from regard.training.planning.training_plan import plan as plan
