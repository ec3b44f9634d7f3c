# The image of the jobs' pods: the agent is PID 1 and starts the job's processes.
#   docker build --build-arg EXTRA=cuda13 --tag registry.example/train:1 .
# BASE: any image with venv and a Python that pyproject.toml accepts. EXTRA: cpu, cuda12, cuda13 or tpu; others after a
# comma (cuda13,gcs). Every package is checked against its hash in requirements/.
# To use your own package index: --secret id=pip,src=pip.conf
# The default base is a stage: Dependabot reads no ARG. buildah 1.28 takes it for unused: --skip-unused-stages=false
ARG BASE=slim
FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea AS slim

# pip and the image's requirements, which are not part of the final image.
FROM ${BASE} AS tools
WORKDIR /opt/requirements
COPY requirements/tools.txt ./
RUN --mount=type=secret,id=pip \
    export PIP_CONFIG_FILE=/run/secrets/pip && python3 -m venv /opt/pip && \
    /opt/pip/bin/python -m pip install --quiet --require-hashes --requirement tools.txt
ARG EXTRA=cpu
COPY requirements ./
RUN cat train.txt $(echo "${EXTRA}" | sed 's/,/.txt /g').txt > image.txt

# Everything except this package: rebuilt only when its requirements change. In a pod the root filesystem is read-only,
# so bytecode is compiled now; it is not checked against file times, which differ between copies of a layer.
FROM ${BASE} AS runtime
COPY --from=tools /opt/requirements/build.txt /opt/requirements/image.txt /opt/jaxlaunch/
RUN --mount=type=bind,from=tools,source=/opt/pip,target=/opt/pip --mount=type=secret,id=pip \
    export PIP_CONFIG_FILE=/run/secrets/pip PIP_NO_COMPILE=1 PIP_ROOT_USER_ACTION=ignore && \
    python3 -m venv --without-pip /opt/jaxlaunch && cd /opt/jaxlaunch && \
    /opt/pip/bin/pip --python bin/python install --quiet --require-hashes --requirement build.txt && \
    /opt/pip/bin/pip --python bin/python install --quiet --require-hashes --no-build-isolation \
      --requirement image.txt && \
    /opt/pip/bin/pip --python bin/python uninstall --quiet --yes --requirement build.txt && \
    bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash lib

FROM runtime AS package
WORKDIR /src
COPY . .
RUN --mount=type=bind,from=tools,source=/opt/pip,target=/opt/pip --mount=type=secret,id=pip \
    export PIP_CONFIG_FILE=/run/secrets/pip PIP_NO_COMPILE=1 PIP_ROOT_USER_ACTION=ignore && \
    pip="/opt/pip/bin/pip --python /opt/jaxlaunch/bin/python" && \
    $pip install --quiet --require-hashes --requirement /opt/jaxlaunch/build.txt && \
    $pip install --quiet --no-deps --no-build-isolation --prefix /opt/package . && \
    python3 -m compileall -q --invalidation-mode unchecked-hash /opt/package

FROM runtime
COPY --from=package /opt/package /opt/jaxlaunch
ENV PATH=/opt/jaxlaunch/bin:$PATH HOME=/tmp
USER 1000:1000
WORKDIR /tmp
ENTRYPOINT ["python", "-I", "-m", "jaxlaunch.launcher.agent"]
