"""Between one daemon and the next: what is kept with a descriptor holder, if there is one."""

from __future__ import annotations

from kvstore.config import DaemonConfig
from kvstore.server.session import Session
from kvstore.store.store import Store
from kvstore.takeover.blocks import adopt_blocks, open_keeper
from kvstore.takeover.estate import Estate, FormerSession
from kvstore.takeover.keeper import DigestOf, Keeper
from kvstore.tiers.adopted import Former

NO_DIGEST = bytes(16)


class Succession:
    """A daemon's keeper and what the daemon before has left; does nothing without a holder."""

    def __init__(self, config: DaemonConfig, name: str) -> None:
        """Claims the holder; blocks for some seconds at most. Raises ConfigError if it is another daemon's."""
        self.keeper: Keeper | None = None
        self._estate: Estate | None = None
        if config.holder_path is not None and config.socket_path is not None:
            self.keeper, self._estate = open_keeper(
                config.holder_path.absolute(), str(config.socket_path.absolute()), config.holder_grace_s, name
            )

    @property
    def former(self) -> Former | None:
        """The memory to be taken over."""
        return self._estate.former if self._estate is not None else None

    def former_sessions(self) -> list[FormerSession]:
        """The clients to be taken over, with their pidfds."""
        return self._estate.sessions if self._estate is not None else []

    @property
    def last_session_id(self) -> int:
        """The highest number a client has had."""
        return self._estate.last_session_id if self._estate is not None else 0

    def adopt_blocks(self, store: Store) -> int:
        """Make the blocks known that the store's DRAM tier has taken over; returns how many."""
        if self._estate is None or self.keeper is None:
            return 0
        keeper, described = self.keeper, self._estate.namespaces
        if store.hierarchy is not None:
            on_nvme = {digest: text for digest, text in store.hierarchy.nvme.namespaces().values() if text}
            described = on_nvme | described

        def ordinal_of(digest: bytes) -> int | None:
            # What the daemon before didn't say, an older one, is left out: nobody could tell what to clear.
            text = described.get(digest, "")
            if digest == NO_DIGEST or not keeper.note_namespace(digest, text):
                return None
            store.namespaces.note(digest, text)
            return store.namespaces.found(digest, text)

        return adopt_blocks(store.index, store.dram, ordinal_of, store.clock.now_s())

    def start_serving(self, store: Store) -> None:
        """All is taken over: clients may come."""
        if self.keeper is not None:
            self.keeper.start_serving(store.dram, self.last_session_id, store.clock.now_s())
        self._estate = None

    def after_request(self, store: Store) -> None:
        """Before a reply goes out: what it says is stored must be found by the next daemon."""
        if self.keeper is not None:
            self.keeper.after_request(store.index, self._digest_of(store))

    def tick(self, store: Store) -> None:
        """Upkeep, every 50 ms."""
        if self.keeper is not None:
            self.keeper.tick(store.index, self._digest_of(store), store.clock.now_s())

    def _digest_of(self, store: Store) -> DigestOf:
        """Of a namespace whose blocks are about to be labelled: what it is must be known to whoever reads the label."""
        keeper, spaces = self.keeper, store.namespaces

        def digest_of(ordinal: int) -> bytes:
            digest = spaces.digest(ordinal)
            noted = keeper is not None and keeper.note_namespace(digest, spaces.description(ordinal))
            return digest if noted else NO_DIGEST

        return digest_of

    def session_opened(self, session: Session) -> None:
        """Before the client hears of it."""
        if self.keeper is not None:
            self.keeper.session_opened(
                session.id, session.token, session.tenant, session.client_name, session.pid, session.pidfd
            )

    def session_gone(self, session_id: int) -> None:
        """Before its pidfd is closed."""
        if self.keeper is not None:
            self.keeper.session_gone(session_id)

    def leave(self) -> None:
        """The daemon ends; what it has goes to the next one."""
        if self.keeper is not None:
            self.keeper.leave()
