# The image: a base with Python 3.11 or newer and pip, and on top of it this package. What the base has, stays.
#
#   docker build -t mlperf-bert .               on NVIDIA's PyTorch image: its torch, apex, DALI and MPI
#   FROM_IMAGE_NAME=... tools/build_image.sh    on another base; by buildah where there is no Docker daemon
#   docker run --gpus all mlperf-bert           ./run_and_time.sh; launch/docker.sh adds data and results
ARG FROM_IMAGE_NAME=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${FROM_IMAGE_NAME}

# Packages go into a virtual environment over the base's own: nothing of the base is written over.
WORKDIR /opt/mlperf_bert_requirements
COPY pyproject.toml tools/image_requirements.py ./
RUN python3 -m venv --system-site-packages --without-pip /opt/venv \
    && python3 image_requirements.py pyproject.toml \
    && python3 -m pip --python /opt/venv/bin/python install --no-cache-dir \
        --requirement requirements.txt --constraint constraints.txt
ENV PYTHON=/opt/venv/bin/python PATH=/opt/venv/bin:$PATH

# A user that is nobody else; home, runs and the embedded corpus may be written under any other --user too.
WORKDIR /workspace
RUN useradd --uid 10001 --create-home bert \
    && mkdir -p runs .cache \
    && chown root: /home/bert \
    && chmod 1777 runs .cache /home/bert
ENV HOME=/home/bert USER=bert LOGNAME=bert

COPY . .
# A base's constraints are for what runs, not for what builds a wheel. The last line: does all of it import?
RUN env -u PIP_CONSTRAINT python3 -m pip --python "$PYTHON" install --no-cache-dir --no-deps --editable . \
    && mlperf_bert --help >/dev/null \
    && python -c 'import mlperf_bert.train, mlperf_logging'

ARG REVISION=unknown
LABEL org.opencontainers.image.title="mlperf-bert" \
      org.opencontainers.image.description="BERT pre-training, MLPerf style" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"

USER 10001
# No entry point, the base's neither: the command is PID 1, and signals reach it.
ENTRYPOINT []
CMD ["./run_and_time.sh"]
