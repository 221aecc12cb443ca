# The image: a base with Python 3.11 or newer and pip, and on top of it this package. What the base has, stays.
#
#   tools/build_image.sh                builds it, by buildah where there is no Docker daemon, and says how to find a digest
#   docker run --gpus all mlperf-bert   ./run_and_time.sh; launch/docker.sh adds data and results
#
# The default base is NVIDIA's PyTorch image: its torch, apex, DALI and MPI. A tag can be moved, a digest not.
ARG FROM_IMAGE_NAME=nvcr.io/nvidia/pytorch:26.06-py3
ARG BASE_DIGEST
FROM ${FROM_IMAGE_NAME}@${BASE_DIGEST}

# Packages go into a virtual environment over the base's own: nothing of the base is written over. As tools/venv.sh does
# it, but without what the base has, in whatever version: its torch was built for its CUDA. A base's constraints are for
# what it has.
WORKDIR /opt/mlperf_bert_requirements
COPY pyproject.toml ./
COPY requirements requirements
COPY tools/lock.py tools/
RUN unset PIP_CONSTRAINT \
    && python3 -m venv --system-site-packages --without-pip /opt/venv \
    && python3 tools/lock.py select --lacking . \
    && python3 -m pip --python /opt/venv/bin/python install --no-cache-dir --require-hashes --no-deps \
        --only-binary :all: --requirement hashed.txt \
    && python3 -m pip --python /opt/venv/bin/python install --no-cache-dir \
        --only-binary :all: --requirement pinned.txt --constraint requirements/pinned.txt
ENV PYTHON=/opt/venv/bin/python PATH=/opt/venv/bin:$PATH PYTHONSAFEPATH=1

# A user that is nobody else; home, runs and the embedded corpus may be written under any other --user too.
WORKDIR /workspace
RUN useradd --uid 10001 --create-home bert \
    && mkdir -p runs .cache \
    && chown root: /home/bert \
    && chmod 1777 runs .cache /home/bert
ENV HOME=/home/bert USER=bert LOGNAME=bert

COPY . .
# The last line: does all of it import?
RUN python3 -m pip --python "$PYTHON" install --no-cache-dir --no-deps --no-build-isolation --editable . \
    && mlperf_bert config show cpu_tiny >/dev/null \
    && mlperf_bert doctor --help >/dev/null \
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
