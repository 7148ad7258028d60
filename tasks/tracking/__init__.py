"""The only door to MLflow. Its rooms: `client` reaches it, `tracker` is the thread that replays what a run has
committed, `mirror` what it replays, `parents` the parent runs of matrices, `registry` the versions of trained models.

A step's record is committed in the run directory first, then replayed. MLflow is a view: when it is slow, down or
broken the run goes on, the trouble is reported, and what is missing is replayed when it is back, or by the next start.
"""

from tasks.destination import Destination as Destination
from tasks.destination import destination as destination
from tasks.tracking.client import TrackingFailed as TrackingFailed
from tasks.tracking.client import make_database as make_database
from tasks.tracking.client import tracked_status as tracked_status
from tasks.tracking.client import upgrade_database as upgrade_database
from tasks.tracking.mirror import TAG_CHANGED as TAG_CHANGED
from tasks.tracking.mirror import TAG_RUN_KEY as TAG_RUN_KEY
from tasks.tracking.mirror import TAG_RUN_UUID as TAG_RUN_UUID
from tasks.tracking.mirror import TAG_TABLES as TAG_TABLES
from tasks.tracking.mirror import Status as Status
from tasks.tracking.mirror import amendments as amendments
from tasks.tracking.parents import TAG_PARENT as TAG_PARENT
from tasks.tracking.parents import adopt as adopt
from tasks.tracking.parents import close_parent as close_parent
from tasks.tracking.parents import log_page as log_page
from tasks.tracking.parents import open_parent as open_parent
from tasks.tracking.parents import tag_run as tag_run
from tasks.tracking.registry import ModelVersion as ModelVersion
from tasks.tracking.registry import champion as champion
from tasks.tracking.registry import judge as judge
from tasks.tracking.registry import promote as promote
from tasks.tracking.registry import register_version as register_version
from tasks.tracking.registry import serve_command as serve_command
from tasks.tracking.registry import versions as versions
from tasks.tracking.tracker import Tracker as Tracker
