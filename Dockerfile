# The image adds this package to a base image with pip and Python 3.11 or newer. It does not change the base's packages.
#
#   docker build --tag mlperf-bert .    builds the image. `podman build` and `buildah bud` accept the same options.
#   docker run --gpus all mlperf-bert   runs ./run_and_time.sh. Use launch/docker.sh to mount data and results.
#
# The default base is NVIDIA's PyTorch image, because it has torch, apex, DALI and MPI. docs/guides/clusters.md says how
# to choose another tag. A tag can be moved to another image, so build a submission's image on a base with a digest:
#
#   docker build --tag mlperf-bert --label org.opencontainers.image.revision="$(git rev-parse HEAD)" \
#       --build-arg FROM_IMAGE_NAME=nvcr.io/nvidia/pytorch:26.06-py3@sha256:<64 digits> .
#
# The digest is in the first line `Digest:` of `docker buildx imagetools inspect BASE`, and in `skopeo inspect
# docker://BASE`. For a base that is only on this machine, `docker images --digests` prints it.
ARG FROM_IMAGE_NAME=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${FROM_IMAGE_NAME}

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

LABEL org.opencontainers.image.title="mlperf-bert" \
      org.opencontainers.image.description="BERT pre-training, MLPerf style" \
      org.opencontainers.image.licenses="Apache-2.0"

USER 10001
# Without an entry point, not even the base's, the command is PID 1 and receives signals.
ENTRYPOINT []
CMD ["./run_and_time.sh"]
