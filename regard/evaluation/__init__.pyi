from regard.evaluation.alignment import align as align
from regard.evaluation.alignment import alignment_error_rate as alignment_error_rate
from regard.evaluation.alignment import format_links as format_links
from regard.evaluation.evaluators import evaluate as evaluate
from regard.evaluation.teacher_forcing import attention_names as attention_names
from regard.evaluation.text_metrics import TextScores as TextScores
from regard.evaluation.text_metrics import squad_scores as squad_scores
from regard.evaluation.text_metrics import text_scores as text_scores
