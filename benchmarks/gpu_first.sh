set -x
export PYTHONPATH=$PWD:$PWD/.carry/py PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,driver_version --format=csv
(timeout 150 python3 -m pytest -x -q -p no:cacheprovider tests/attention tests/models/test_seq2seq.py -k "cuda or captured" 2>&1 | tail -25)
M=recipes/multi30k-transformer.toml
cp -r .carry/multi30k /tmp/multi30k
timeout 120 python3 benchmarks/multi30k.py --data /tmp/multi30k/tok --out /tmp/r0 --at-once 1 "en-de $M steps=1500 validate_every=1500 log_every=100 tokenizer.dropout=0.0"
tail -8 /tmp/r0/run0.log
