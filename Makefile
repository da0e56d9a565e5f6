# The targets for building and testing; the work is in scripts/.
.PHONY: help prerequisites build test soak demo bench bench-network install uninstall deb man fmt clippy images clean

PREFIX ?= /usr/local

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 24

prerequisites: ## check Rust and Debian packages, as root install what is missing
	@scripts/prerequisites

build: prerequisites ## build everything (dev profile, the one that demo and test use)
	cargo build --workspace --locked

test: prerequisites ## every check and every test, real guests included
	scripts/test

soak: prerequisites ## the random tests again and again, with new seeds; MINUTES=60
	scripts/soak $(or $(MINUTES),60)

demo: build ## an encrypted VM on this machine, from creation to proof; PROVIDER=kmip: with keys of a key server
	scripts/demo --provider $(or $(PROVIDER),native)

bench: prerequisites ## measure disks beside QEMU's storage daemon and nbdkit, operations encrypted beside plain, migrations, and Ceph
	scripts/bench

bench-network: prerequisites ## measure a guest's network card beside QEMU started by hand, as root
	scripts/bench-network

install: prerequisites ## programs, manual pages, completions, systemd units; PREFIX=/usr/local, DESTDIR=
	cargo build --release --locked -p vmseal -p vmseal-iofilter -p vmseal-rbd
	PREFIX=$(PREFIX) DESTDIR=$(DESTDIR) scripts/install

uninstall: ## remove what install has put there; disks, inventory and keys stay; PREFIX=/usr/local, DESTDIR=
	PREFIX=$(PREFIX) DESTDIR=$(DESTDIR) scripts/uninstall

deb: prerequisites ## a Debian package in target/
	cargo build --release --locked -p vmseal -p vmseal-iofilter -p vmseal-rbd
	scripts/deb

man: build ## write the manual pages to target/man
	target/debug/vmseal man --dir target/man

fmt: prerequisites ## format the Rust code
	cargo fmt --all

clippy: prerequisites ## lint; warnings are errors
	cargo clippy --workspace --all-targets --locked -- -D warnings

images: prerequisites ## build the guests of demo and tests now
	scripts/build-debian-image
	scripts/build-test-initramfs
	scripts/build-network-guest
	scripts/build-network-guest --redis

clean: ## remove all that was built, cached guests too
	cargo clean
	rm -rf .cache
