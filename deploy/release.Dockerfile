# The image of a release: the program, the libraries of Debian that it loads, and certificates. ci/package.sh makes the folder `root`; nothing
# is pulled. Models are files in the volume: mount a folder that has them, because the image has no pip, which downloads the default model.
FROM scratch
COPY root /
# The user may write here: `up` leaves the file by which `tandem top` finds it, and its cluster key.
COPY --chown=10001:10001 home /var/lib/tandem
ENV HOME=/var/lib/tandem PATH=/usr/local/bin TANDEM_MODELS_DIR=/var/lib/tandem/models
USER 10001:10001
VOLUME /var/lib/tandem/models
# Containers are stopped with SIGTERM, which drains the process.
ENTRYPOINT ["tandem"]
CMD ["up", "--listen", "0.0.0.0:8000"]
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s CMD ["tandem", "ready", "127.0.0.1:8000"]
