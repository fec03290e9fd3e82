//! Where a test may cut the power, or have a step fail.

use std::io;

/// What is asked before each step of a change; outside of tests nothing ever goes wrong here.
#[derive(Default)]
pub(super) struct Cut {
    /// Steps that still go well, and how the one behind them fails.
    #[cfg(test)]
    plan: Option<(u32, Fault)>,
    #[cfg(test)]
    off: bool,
    /// What somebody else does meanwhile.
    #[cfg(test)]
    meanwhile: Option<(u32, Box<dyn FnOnce() + Send>)>,
}

/// How a step fails.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The power goes: nothing else is done either.
    Power,
    /// No room, once.
    Full,
}

#[cfg(not(test))]
impl Cut {
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "tests have steps fail")]
    pub(super) fn step(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
impl Cut {
    pub(super) fn after(steps: u32, fault: Fault) -> Cut {
        Cut { plan: Some((steps, fault)), ..Cut::default() }
    }

    /// Somebody else does this when so many steps have been taken.
    pub(super) fn meanwhile(steps: u32, act: impl FnOnce() + Send + 'static) -> Cut {
        Cut { meanwhile: Some((steps, Box::new(act))), ..Cut::default() }
    }

    /// Whether what was to happen has.
    pub(super) fn has_come(&self) -> bool {
        self.plan.is_none() && self.meanwhile.is_none()
    }

    pub(super) fn step(&mut self) -> io::Result<()> {
        match &mut self.meanwhile {
            Some((0, _)) => {
                if let Some((_, act)) = self.meanwhile.take() {
                    act();
                }
            }
            Some((left, _)) => *left -= 1,
            None => {}
        }
        if self.off {
            return Err(io::Error::other("the power is off"));
        }
        match &mut self.plan {
            None => Ok(()),
            Some((0, fault)) => {
                let fault = *fault;
                self.plan = None;
                self.off = fault == Fault::Power;
                Err(match fault {
                    Fault::Power => io::Error::other("the power went off"),
                    Fault::Full => rustix::io::Errno::NOSPC.into(),
                })
            }
            Some((left, _)) => {
                *left -= 1;
                Ok(())
            }
        }
    }
}
