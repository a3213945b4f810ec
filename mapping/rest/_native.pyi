from mapping.rest.plain import json_records as json_records
from mapping.rest.plain import text_records as text_records
