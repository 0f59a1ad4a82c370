# The owner of a store, by `kvstore serve`, from this checkout.
#
#     docker build -t kvstore .
#     docker run --read-only --tmpfs /tmp --stop-timeout 90 -v data:/data -p 7447:7447 \
#       -v ./secrets:/run/secrets:ro kvstore
#
# The image runs as a user without rights, its file system may be read-only, and its data lies in
# /data. `secrets` has the files that an address of other machines needs: tokens, and a certificate
# with its key. The probe asks the owner by its socket in the store's directory.
FROM python:3.13-slim AS build
COPY . /source
RUN python -m venv /opt/kvstore \
 && /opt/kvstore/bin/pip install --no-cache-dir --disable-pip-version-check \
      --build-constraint /source/constraints.txt -c /source/constraints.txt '/source[server,metrics]'

FROM python:3.13-slim
RUN useradd --uid 1000 --no-create-home kvstore && install -d -o kvstore /data
COPY --from=build /opt/kvstore /opt/kvstore
ENV PATH=/opt/kvstore/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /data
USER 1000
VOLUME /data
EXPOSE 7447
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
  CMD ["python", "-c", "import kvstore; kvstore.connect('/data/store.db', timeout=3).close()"]
ENTRYPOINT ["kvstore", "serve", "/data/store.db", "--create", "--listen", "0.0.0.0:7447"]
CMD ["--token-file", "/run/secrets/tokens", "--tls-cert", "/run/secrets/server.pem", "--tls-key", "/run/secrets/server.key"]
