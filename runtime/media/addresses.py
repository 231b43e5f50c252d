"""Which network addresses a client may have this server connect to."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address

_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address
_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")  # RFC 8215: any translation of the network's own
_ASSIGNED = IPv4Network("192.0.0.0/24")  # RFC 6890: of protocols, no host on the internet
_COMPATIBLE = IPv6Network("::/96")  # RFC 4291 2.5.5.1, deprecated: the last 32 bits are an IPv4 address


def innermost(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for: IPv4-mapped, NAT64, 6to4 or Teredo. An address that
    stands for none is itself."""
    if not isinstance(address, IPv6Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    if address.teredo is not None:
        return address.teredo[1]
    return address.ipv4_mapped or address.sixtofour or address


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet: not private, shared (CGNAT), loopback, link-local
    (metadata services of clouds), multicast, reserved or unspecified, in whatever form it is written."""
    if isinstance(address, IPv6Address) and (address in _LOCAL_NAT64 or address in _COMPATIBLE):
        return False
    inner = innermost(address)
    if isinstance(inner, IPv6Address) and inner.is_site_local:
        return False
    if isinstance(inner, IPv4Address) and inner in _ASSIGNED:
        return False
    return inner.is_global and not inner.is_multicast and not inner.is_reserved


def is_reachable(address: Address) -> bool:
    """Whether a host that the operator has named may have this address: private ones too, but none of
    link-local, multicast and unspecified addresses."""
    inner = innermost(address)
    return not (inner.is_link_local or inner.is_multicast or inner.is_unspecified)


def is_allowed(text: str, host: str, domains: frozenset[str]) -> bool:
    """Whether `host` may be connected to at the address `text`. `domains`: hosts that the operator has named;
    an address that is named itself may be any."""
    address = ip_address(text.split("%")[0])
    if host in domains:
        return host == text or is_reachable(address)
    return is_public(address)
