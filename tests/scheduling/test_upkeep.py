from runtime.scheduling.upkeep import Upkeep
from tests.scheduling.world import World


def audits(upkeep: Upkeep) -> list[str]:
    run = upkeep.run()
    try:
        while True:
            next(run)
    except StopIteration as end:
        words: list[str] = end.value.messages
        return words


def test_an_audit_is_due_once_after_work() -> None:
    world = World()
    upkeep = Upkeep(world.scheduler)
    assert not upkeep.is_due, "nothing has happened"
    world.add([1, 2, 3], max_new_tokens=2)
    assert not upkeep.is_due
    world.run()
    assert upkeep.is_due
    assert audits(upkeep) == [] and not upkeep.is_due


def test_a_leak_is_quarantined_and_the_rest_goes_on() -> None:
    world = World(num_pages=12, num_host_pages=9, page_size=4)
    world.add(list(range(20, 40)), max_new_tokens=2)
    world.run()
    (lost,) = world.scheduler.cache.pool.allocate(1)
    upkeep = Upkeep(world.scheduler)
    assert audits(upkeep) == [f"page {lost} has 0 owners"] and not upkeep.is_due
    assert world.scheduler.cache.num_used == 0 and world.scheduler.config.pool_tokens == 10 * 4
    (longest,) = world.add([1, 2, 3], ignore_eos=True)
    world.config = world.scheduler.config
    for _ in range(1000):
        while world.submit():
            assert all(lost not in s.pages for s in world.scheduler.roster.live.values())
        if not world.results:
            break
        world.receive()
    assert len(world.seen[longest]) == 40 - 3 and world.seen[longest] == world.expected(longest)
    world.die(num_pages=12)
    assert world.scheduler.cache.pool.num_pages == 11, "new ranks have new pages"
