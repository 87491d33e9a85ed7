//! Messages from rank to rank, and whether each arrived as it was sent.

use symmem::{Deadline, with_element};

use crate::element::Plain;
use crate::lane::Runner;
use crate::program::Messages;
use crate::slices::difference;

/// Sends one to the rank so far ahead, and receives the one of the rank so far behind.
pub fn run(runner: &mut Runner<'_>, messages: Messages) {
    with_element!(messages.dtype, T => pass::<T>(runner, messages));
}

fn pass<T: Plain>(runner: &mut Runner<'_>, Messages { len, distance, any, .. }: Messages) {
    let (source, group) = (runner.source(), runner.group.clone());
    let (own, n) = (group.rank(), group.size());
    let [to, from] = [(own + distance) % n, (own + n - distance % n) % n];
    let [to_name, from_name] = [to, from].map(|rank| group.world_ranks()[rank]);
    // What an attempt that gave up has left on the way is not taken for the message of another step.
    let tag = (runner.lane.number as u64) << 32 | runner.call as u64;
    let deadline = Deadline::within(runner.limit);

    let data = source.elements::<T>(runner.own.rank, len);
    let send = |_| Some(group.send_by(&data, to, tag, deadline));
    runner.resumed(&group, format!("send>{to_name}"), send);

    let mut got = source.elements::<T>(99, len);
    let name = format!("{}<{from_name}", if any { "recv_any" } else { "recv" });
    let receive = |_| {
        Some(match any {
            true => group.recv_any_by(&mut got, tag, deadline),
            false => group.recv_by(&mut got, from, tag, deadline).map(|()| from),
        })
    };
    let Some(sender) = runner.resumed(&group, name, receive) else { return };
    let expected = source.elements::<T>(from_name, len).into_iter();
    let other = (sender != from).then(|| format!("it is said to be of rank {sender}"));
    if let Some(why) = other.or_else(|| difference(&got, expected)) {
        runner.fault(format!("message of call {} from rank {from_name}: {why}", runner.call));
    }
}
