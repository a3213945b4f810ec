#!/bin/sh
# HTTP with curl: produce three readings, receive them as a consumer, delete the consumer.
# sh examples/http_curl.sh [HOST:PORT] [TOPIC]
set -eu

base=http://${1:-127.0.0.1:8080}
topic=${2:-house}
consumers=$base/consumers/http-curl-$$
json='Content-Type: application/vnd.kafka.json.v2+json'
command='Content-Type: application/vnd.kafka.v2+json'

call() { curl --silent --show-error --fail-with-body --max-time 60 "$@"; }

# The response has an offset for each record, which every in-sync replica of Kafka has then.
call -H "$json" "$base/topics/$topic" --output /dev/null -d '{"records": [
    {"key": "kitchen/temp", "value": 21.5},
    {"key": "kitchen/temp", "value": 21.7},
    {"key": "kitchen/temp", "value": 21.6}]}'

call -H "$command" "$consumers" --output /dev/null \
    -d '{"name": "reader", "format": "json", "auto.offset.reset": "earliest"}'
trap 'call -X DELETE "$consumers/instances/reader"' EXIT
call -H "$command" "$consumers/instances/reader/subscription" -d "{\"topics\": [\"$topic\"]}"

# A poll waits up to `timeout` ms and may return fewer records: poll until all are there. The next poll commits.
left=3
while [ "$left" -gt 0 ]; do
    records=$(call -H 'Accept: application/vnd.kafka.json.v2+json' "$consumers/instances/reader/records?timeout=5000" |
        grep -o '"key":"[^"]*","value":[0-9.][0-9.]*' | sed 's/"key":"\(.*\)","value":\(.*\)/\1 \2/') || continue
    echo "$records"
    left=$((left - $(echo "$records" | wc -l)))
done
