//! Authentication and encryption of a connection between hosts, by the job's secret: Noise `NNpsk0`, bound to the job's token and to
//! the two ranks. A recorded connection cannot be replayed.

use snow::params::NoiseParams;
use snow::{Builder, HandshakeState, StatelessTransportState};

use super::stream::SEAL;

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// The bytes of each of the two messages: an ephemeral key, and the authentication tag of an empty payload.
pub(super) const MESSAGE: usize = 32 + SEAL;

/// What the ends must agree on.
#[derive(Clone, Copy)]
pub(super) struct Bond<'a> {
    /// The key derived from the job's secret for its connections.
    pub(super) key: &'a [u8; 32],
    pub(super) token: u128,
    /// The calling rank, and the called one.
    pub(super) from: usize,
    pub(super) to: usize,
}

impl Bond<'_> {
    fn begin(
        self,
        build: impl FnOnce(Builder<'_>) -> Result<HandshakeState, snow::Error>,
    ) -> Option<HandshakeState> {
        let numbers = [self.from, self.to].map(|rank| (rank as u64).to_le_bytes()).concat();
        let prologue = [&b"symmem mesh 1"[..], &self.token.to_le_bytes(), &numbers].concat();
        let params: NoiseParams = PATTERN.parse().ok()?;
        let builder = Builder::new(params).psk(0, self.key).ok()?.prologue(&prologue).ok()?;
        build(builder).ok()
    }

    /// The caller's message, and the state that reads the answer.
    pub(super) fn call(self) -> Option<(Proof, Vec<u8>)> {
        let mut state = self.begin(|builder| builder.build_initiator())?;
        let message = write(&mut state)?;
        Some((Proof(Box::new(state)), message))
    }

    /// The answer to a caller that knows the secret, and the keys. They are useless to one who replays a recorded call.
    pub(super) fn answer(self, call: &[u8]) -> Option<(Keys, Vec<u8>)> {
        let mut state = self.begin(|builder| builder.build_responder())?;
        read(&mut state, call)?;
        let message = write(&mut state)?;
        Some((Keys::of(state)?, message))
    }
}

/// A call that has not been answered.
pub(super) struct Proof(Box<HandshakeState>);

impl Proof {
    /// The keys, if the answer proves knowledge of the secret.
    pub(super) fn finish(mut self, answer: &[u8]) -> Option<Keys> {
        read(&mut self.0, answer)?;
        Keys::of(*self.0)
    }
}

fn write(state: &mut HandshakeState) -> Option<Vec<u8>> {
    let mut message = vec![0; MESSAGE];
    let len = state.write_message(&[], &mut message).ok()?;
    (len == MESSAGE).then_some(message)
}

fn read(state: &mut HandshakeState, message: &[u8]) -> Option<()> {
    let mut nothing = [0; MESSAGE];
    (message.len() == MESSAGE && state.read_message(message, &mut nothing) == Ok(0)).then_some(())
}

/// The keys that encrypt and decrypt the packets of one connection: one key for each direction, and a number for each packet.
pub(super) struct Keys(Box<StatelessTransportState>);

impl Keys {
    fn of(state: HandshakeState) -> Option<Self> {
        Some(Self(Box::new(state.into_stateless_transport_mode().ok()?)))
    }

    pub(super) fn seal(&self, number: u64, packet: &[u8]) -> Option<Vec<u8>> {
        let mut sealed = vec![0; packet.len() + SEAL];
        let len = self.0.write_message(number, packet, &mut sealed).ok()?;
        (len == sealed.len()).then_some(sealed)
    }

    /// The packet, if the other end sealed it and it is the one of this number.
    pub(super) fn open(&self, number: u64, sealed: &[u8]) -> Option<Vec<u8>> {
        let mut packet = vec![0; sealed.len()];
        let len = self.0.read_message(number, sealed, &mut packet).ok()?;
        packet.truncate(len);
        Some(packet)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOND: Bond<'_> = Bond { key: &[7; 32], token: 5, from: 3, to: 1 };

    fn keys(caller: Bond<'_>, called: Bond<'_>) -> Option<(Keys, Keys)> {
        let (proof, call) = caller.call().unwrap();
        let (theirs, answer) = called.answer(&call)?;
        Some((proof.finish(&answer)?, theirs))
    }

    #[test]
    fn ends_that_agree_have_keys_that_open_what_the_other_sealed() {
        let (ours, theirs) = keys(BOND, BOND).unwrap();
        let sealed = ours.seal(0, b"packet").unwrap();
        assert_eq!(theirs.open(0, &sealed).unwrap(), b"packet");
        assert_eq!(ours.open(9, &theirs.seal(9, b"answer").unwrap()).unwrap(), b"answer");
        // Not twice, not in another place, not sent back, not changed.
        assert!(theirs.open(1, &sealed).is_none() && ours.open(0, &sealed).is_none());
        for bit in 0..8 * sealed.len() {
            let mut forged = sealed.clone();
            forged[bit / 8] ^= 1 << (bit % 8);
            assert!(theirs.open(0, &forged).is_none());
        }
        assert!(theirs.open(0, &[]).is_none() && theirs.open(0, &sealed[1..]).is_none());
    }

    #[test]
    fn ends_that_differ_in_anything_get_no_keys() {
        for other in [
            Bond { key: &[8; 32], ..BOND },
            Bond { token: 6, ..BOND },
            Bond { from: 4, ..BOND },
            Bond { to: 0, ..BOND },
            Bond { from: 1, to: 3, ..BOND },
        ] {
            assert!(keys(BOND, other).is_none() && keys(other, BOND).is_none());
        }
    }

    #[test]
    fn a_recorded_call_or_answer_is_of_no_use() {
        let (first, call) = BOND.call().unwrap();
        let (_, answer) = BOND.answer(&call).unwrap();
        let (again, replayed) = BOND.answer(&call).unwrap();
        assert_ne!(answer, replayed);
        let ours = first.finish(&answer).unwrap();
        assert!(again.open(0, &ours.seal(0, b"packet").unwrap()).is_none());
        let (second, _) = BOND.call().unwrap();
        assert!(second.finish(&answer).is_none());
    }

    #[test]
    fn messages_of_other_lengths_are_refused() {
        let (_, call) = BOND.call().unwrap();
        for len in 0..MESSAGE {
            assert!(BOND.answer(&call[..len]).is_none());
        }
        assert!(BOND.answer(&[&call[..], &[0]].concat()).is_none());
    }
}
