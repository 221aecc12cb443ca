# The image adds this package to a base image with pip and Python 3.11 or newer. It does not change the base's packages.
#
#   tools/build_image.sh                builds the image, with buildah if there is no Docker daemon. It also says how to
#                                       find the digest of a base.
#   docker run --gpus all mlperf-bert   runs ./run_and_time.sh. Use launch/docker.sh to mount data and results.
#
# The default base is NVIDIA's PyTorch image, because it has torch, apex, DALI and MPI. BASE_DIGEST is required, because
# a tag can be moved to another image.
ARG FROM_IMAGE_NAME=nvcr.io/nvidia/pytorch:26.06-py3
ARG BASE_DIGEST
FROM ${FROM_IMAGE_NAME}@${BASE_DIGEST}

# Packages are installed into a virtual environment on top of the base's own packages, which stay unchanged. Packages
# that the base has are not installed again, in whatever version, because its torch was built for its CUDA. Otherwise
# this does the same as tools/venv.sh. PIP_CONSTRAINT is unset, because the base's constraints are for its own packages.
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

# The image has its own user. Any other --user can also write to the home directory, runs/ and the embedded corpus.
WORKDIR /workspace
RUN useradd --uid 10001 --create-home bert \
    && mkdir -p runs .cache \
    && chown root: /home/bert \
    && chmod 1777 runs .cache /home/bert
ENV HOME=/home/bert USER=bert LOGNAME=bert

COPY . .
# The last lines check that everything can be imported.
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
# Without an entry point, not even the base's, the command is PID 1 and receives signals.
ENTRYPOINT []
CMD ["./run_and_time.sh"]
